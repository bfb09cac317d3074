"""The process of a rollout replica and its engine."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from laminar_py.config.engine import BACKENDS, EngineLaunch
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.records.codec import decode, encode
from laminar_py.records.engine import EngineLostError
from laminar_py.records.environment import Environments
from laminar_py.records.host import SystemClock
from laminar_py.relay.sockets import RelayKeys, SocketFactory
from laminar_py.runtime.cluster.errors import bug_in
from laminar_py.runtime.workers.processes.setup import PartActor, open_folder, open_part, open_reader
from laminar_py.runtime.workers.specs import ReplicaSpec

log = logging.getLogger(__name__)

# On a machine that they share the learner goes first: generation runs ahead of it, never the other way round.
REPLICA_NICENESS = 10


class ReplicaActor(PartActor):
    """Shell of a rollout replica."""

    async def start(self, data: bytes) -> None:
        """Wire engine, relay subscriber and replica."""
        from laminar_py.relay.sockets import PeerClient, peer_sockets
        from laminar_py.relay.subscriber import Subscriber
        from laminar_py.rollout.replica import Replica
        from laminar_py.rollout.storing import SegmentStore
        from laminar_py.runtime.link.replica_link import ReplicaLink

        spec = decode(ReplicaSpec, data)
        config = open_part(spec, f"replica-{spec.index}")
        rollout = config.rollout
        if rollout.engine.yields_cpus:
            os.nice(REPLICA_NICENESS)
        launch = EngineLaunch(
            model_dir=Path(spec.model_dir),
            logs=Path(spec.run_dir) / "logs",
            index=spec.index,
            secret=spec.secret,
            server=spec.server,
        )
        with _telling_bugs(config):
            engine = await BACKENDS.get(rollout.engine.kind).open(config, launch)
        keys = RelayKeys(spec.public_key, spec.secret_key)
        wire = peer_sockets(keys)
        self._weights = Subscriber(spec.relay, name=f"replica-{spec.index}", keys=keys)
        self._listening = asyncio.create_task(self._weights.run(), name="subscriber")
        self._replica = Replica(
            spec.index,
            engine=engine,
            weights=self._weights,
            store=SegmentStore(open_folder(spec), spec.label, open_reader(spec)),
            clock=SystemClock(),
            on_new_weights=OnNewWeights(rollout.on_new_weights),
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=rollout.partial_interval_s,
            reports_partials=config.reward.looks_ahead,
            max_seconds=rollout.max_seconds,
            verify_every=rollout.engine.verify_every,
            initial=spec.assignments,
            gather_s=spec.pace.gather_s,
            environments=_environments(config, spec, wire),
        )
        self._config = config
        peer, attach = PeerClient(wire, spec.hub, spec.label), self._weights.attach
        link = ReplicaLink(peer, spec.label, self._replica, attach=attach, quiet_s=spec.pace.quiet_s)
        self._task = asyncio.create_task(self._replica.run(), name="replica")
        self._link = asyncio.create_task(link.run(), name="link")

    async def speed(self) -> bytes:
        """`EngineSpeed` of its engine, which is measured unless it is known."""
        from laminar_py.engines.model_sizes import read_sizes
        from laminar_py.runtime.workers.processes.engine_speed import Measured, engine_speed

        config = self._config
        vocab = read_sizes(config.model.path).vocab_size

        async def measure() -> Measured:
            sampling = config.rollout.sampling.params()
            max_len = config.rollout.max_len
            return Measured(*await self._replica.measure_speed(vocab=vocab, max_len=max_len, sampling=sampling))

        return encode(await engine_speed(config, measure))

    async def ended(self) -> None:
        """Return never: raises what ended the replica, once its last report was told."""
        tasks = {self._link, self._task, self._listening}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with _telling_bugs(self._config):
            for task in (self._task, self._listening, self._link):
                if task.done():
                    log.error("%s ended", task.get_name(), exc_info=task.exception())
                    task.result()


def _environments(config: RunConfig, spec: ReplicaSpec, wire: SocketFactory) -> Environments | None:
    """Environments of the trajectories here: processes of their own, or a model of them in this one."""
    from laminar_py.engines.emulated.turns import environments_of
    from laminar_py.runtime.workers.remote_environments import RemoteEnvironments

    if not spec.environments:
        return environments_of(config)
    return RemoteEnvironments(spec.environments, wire, spec.label)


@contextlib.contextmanager
def _telling_bugs(config: RunConfig) -> Iterator[None]:
    """Have a mistake end the run, also one that ended the engine; of an installed backend it names the package."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, EngineLostError) else None
        bug = bug_in(cause or error)
        if bug is None:
            raise
        raise BACKENDS.package_error(config.rollout.engine.kind, bug) from None
