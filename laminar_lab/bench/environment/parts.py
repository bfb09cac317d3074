"""A replica and a process of environments, as a run has them. Used by benchmarks of turns and of the endpoint."""

import secrets
from pathlib import Path

from laminar_lab.bench.environment.replica import BenchReplicaActor, ClockedReplicaSpec
from laminar_py.config.run import RunConfig
from laminar_py.records.codec import encode
from laminar_py.relay.wire.transport import RelayKeys
from laminar_py.runtime.cluster.backend import LOOPBACK
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.environments import CALLS
from laminar_py.runtime.workers.processes.environment import EnvironmentActor
from laminar_py.runtime.workers.specs import EnvironmentSpec

PATIENCE_S = 240.0
NAME = "bench.environment-0"


class TurnParts:
    """A replica and a process of environments, e.g. `TurnParts(folder, ClockedReplicaActor)`, in a Ray cluster."""

    def __init__(self, run: Path, replica: type[BenchReplicaActor]) -> None:
        self._run = run
        (run / "logs").mkdir(parents=True)
        self._environment = Part(
            "environment-0", EnvironmentActor, concurrency=CALLS, timeout_s=PATIENCE_S, known_as=NAME
        )
        self.replica = Part("replica-0", replica, concurrency=8, timeout_s=PATIENCE_S)

    async def start(self, config: RunConfig, *, messages: bool) -> None:
        """Return once both serve; prompts are `messages`, or text."""
        given, run_dir = config.model_dump_json(), str(self._run)
        keys = RelayKeys.generate()
        pair = {"public_key": keys.public, "secret_key": keys.secret}
        environment = EnvironmentSpec(
            config=given, run_dir=run_dir, index=0, messages=messages, host=LOOPBACK, **pair
        )
        replica = ClockedReplicaSpec(
            config=given,
            run_dir=run_dir,
            label="replica-0",
            store_key=secrets.token_hex(32),
            environments=[NAME],
            **pair,
        )
        await self._environment.call("start", encode(environment))
        await self.replica.call("start", encode(replica))
