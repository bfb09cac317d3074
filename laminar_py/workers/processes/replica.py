"""The process of a rollout replica and its engine."""

import asyncio
import logging
import os
from pathlib import Path

from laminar_py.config.loading import read_config
from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.clock import SystemClock
from laminar_py.records.codec import decode, encode
from laminar_py.records.replica import Assignment
from laminar_py.workers.processes.setup import log_to
from laminar_py.workers.specs import ReplicaSpec

log = logging.getLogger(__name__)

# On a machine that they share the learner goes first: generation runs ahead of it, never the other way round.
REPLICA_NICENESS = 10


class ReplicaActor:
    """Shell of a rollout replica."""

    async def start(self, data: bytes) -> int:
        """Wire engine, relay subscriber and replica; the id of its process."""
        from laminar_py.engines.registry import EngineLaunch, backend_of
        from laminar_py.relay.subscriber import Subscriber
        from laminar_py.relay.wire.transport import RelayKeys
        from laminar_py.rollout.replica import Replica

        spec = decode(ReplicaSpec, data)
        log_to(spec.run_dir, f"replica-{spec.index}")
        config = read_config(spec.config)
        rollout = config.rollout
        if rollout.engine.yields_cpus:
            os.nice(REPLICA_NICENESS)
        logs = Path(spec.run_dir) / "logs"
        launch = EngineLaunch(Path(spec.model_dir), logs, index=spec.index, secret=spec.secret)
        engine = await backend_of(config).open(config, launch)
        keys = RelayKeys(spec.public_key, spec.secret_key)
        weights = Subscriber(spec.relay, name=f"replica-{spec.index}", keys=keys)
        self._listening = asyncio.create_task(weights.run(), name="subscriber")
        self._replica = Replica(
            spec.index,
            engine=engine,
            weights=weights,
            clock=SystemClock(),
            on_new_weights=OnNewWeights(rollout.on_new_weights),
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=rollout.partial_interval_s,
            max_seconds=rollout.max_seconds,
            verify_every=rollout.engine.verify_every,
            initial=spec.assignments,
        )
        self._config = config
        self._task = asyncio.create_task(self._replica.run(), name="replica")
        return os.getpid()

    async def speed(self) -> bytes:
        """`EngineSpeed` of its engine, which is measured unless it is known."""
        from laminar_py.engines.model_sizes import read_sizes
        from laminar_py.workers.processes.engine_speed import Measured, engine_speed

        config = self._config
        vocab = read_sizes(config.model.path).vocab_size

        async def measure() -> Measured:
            sampling = config.rollout.sampling.params()
            max_len = config.rollout.max_len
            return Measured(*await self._replica.measure_speed(vocab=vocab, max_len=max_len, sampling=sampling))

        return encode(await engine_speed(config, measure))

    async def submit(self, data: bytes) -> None:
        """Hand assignments over."""
        self._replica.submit(decode(list[Assignment], data))

    async def abort(self, data: bytes) -> None:
        """End these trajectories."""
        await self._replica.abort(decode(list[str], data))

    async def survey(self) -> bytes:
        """`Survey` of what it runs."""
        return encode(await self._replica.survey())

    async def expect(self, version: int, data: bytes) -> bool:
        """True where it keeps that version until these trajectories have come."""
        return self._replica.expect(version, decode(list[str], data))

    async def call_off(self, data: bytes) -> None:
        """Expect these trajectories no more."""
        self._replica.call_off(decode(list[str], data))

    async def give_up(self, data: bytes) -> None:
        """End these trajectories, which go on elsewhere, and report them at once."""
        await self._replica.give_up(decode(list[str], data))

    async def stop(self) -> None:
        """Interrupt everything; partial responses are reported."""
        await self._replica.stop()

    async def collect(self, timeout_s: float) -> bytes:
        """The next `ReplicaReport`; raises what ended the replica, if anything did."""
        report = asyncio.create_task(self._replica.collect(timeout_s), name="collect")
        await asyncio.wait([report, self._task, self._listening], return_when=asyncio.FIRST_COMPLETED)
        for task in (self._task, self._listening):
            if task.done():
                report.cancel()
                log.error("%s ended", task.get_name(), exc_info=task.exception())
                task.result()
        return encode(await report)
