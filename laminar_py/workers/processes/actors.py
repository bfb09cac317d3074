"""Ray actors: thin shells around the parts. They decode a spec, wire the part and pass bytes through.

One process each. Everything that crosses is the bytes of a typed record or a scalar; a part that failed
raises its own error at its next call, and the supervisor decides what then.
"""

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from laminar_py.config.cluster import Device
from laminar_py.config.engine import EngineConfig, EngineKind
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.records.clock import SystemClock
from laminar_py.records.codec import decode, encode
from laminar_py.records.metrics import LearnerProgress
from laminar_py.records.replica import Assignment
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import Trajectory
from laminar_py.relay.wire.messages import RelayEvent
from laminar_py.workers.processes.one_thread import OneThread
from laminar_py.workers.specs import (
    LearnerSpec,
    ReferenceSpec,
    RelayNews,
    RelaySpec,
    ReplicaSpec,
    ScorerSpec,
    StepRequest,
)

log = logging.getLogger(__name__)

# On a machine that they share the learner goes first: generation runs ahead of it, never the other way round.
REPLICA_NICENESS = 10


def _log_to(run_dir: str, part: str) -> None:
    logging.basicConfig(
        filename=Path(run_dir) / "logs" / f"{part}.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _share_cpus(engine: EngineConfig) -> None:
    """In a replica's process, where its engine computes on CPUs."""
    if engine.kind is EngineKind.LOCAL:
        _one_thread()
    if engine.kind is EngineKind.LOCAL or engine.device is Device.CPU:
        os.nice(REPLICA_NICENESS)


def _import_learner() -> None:
    import laminar_py.workers.processes.learner_part  # noqa: F401 (for `start`)


class RelayActor:
    """A relay node."""

    async def start(self, data: bytes) -> str:
        """Bind and run; the node's endpoint."""
        from laminar_py.relay.node.relay_node import RelayNode
        from laminar_py.relay.store.pages import allow_many_files
        from laminar_py.relay.wire.transport import RelayKeys

        allow_many_files()
        spec = decode(RelaySpec, data)
        _log_to(spec.run_dir, f"relay-{spec.node}")
        relay = RunConfig.model_validate_json(spec.config).relay
        self._news: list[RelayEvent] = []
        self._node = RelayNode(
            f"relay-{spec.node}",
            store=Path(spec.store),
            keys=RelayKeys(spec.public_key, spec.secret_key),
            host=relay.host,
            port=spec.port,
            parents=list(spec.parents),
            chunk_bytes=spec.chunk_bytes,
            keep_versions=relay.keep_versions,
            max_bytes_per_s=relay.max_bytes_per_s,
            emit=self._news.append,
        )
        await self._node.start()
        self._task = asyncio.create_task(self._node.run(), name="relay")
        return self._node.endpoint

    async def ping(self) -> bytes:
        """Its `RelayNews`; raises what ended the node, if anything did."""
        if self._task.done():
            self._task.result()
        news = RelayNews(os.getpid(), list(self._news))
        self._news.clear()
        return encode(news)


class ReplicaActor:
    """A rollout replica with its engine."""

    async def start(self, data: bytes) -> int:
        """Wire engine, relay subscriber and replica; its process id."""
        from laminar_py.engines.opening import open_engine
        from laminar_py.relay.subscriber import Subscriber
        from laminar_py.relay.wire.transport import RelayKeys
        from laminar_py.rollout.replica import Replica

        spec = decode(ReplicaSpec, data)
        _log_to(spec.run_dir, f"replica-{spec.index}")
        config = RunConfig.model_validate_json(spec.config)
        rollout = config.rollout
        if config.emulation is None:
            _share_cpus(rollout.engine)
        logs = Path(spec.run_dir) / "logs"
        engine = await open_engine(
            config, model_dir=Path(spec.model_dir), logs=logs, index=spec.index, api_key=spec.api_key
        )
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
        """Its `Survey`."""
        return encode(await self._replica.survey())

    async def expect(self, version: int, data: bytes) -> bool:
        """Whether it keeps that version until these trajectories have come."""
        return self._replica.expect(version, decode(list[str], data))

    async def call_off(self, data: bytes) -> None:
        """These trajectories will not come."""
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


class LearnerActor:
    """One rank of the learner. Calls come on threads, as some are waited for beside a step; it computes on one."""

    def __init__(self) -> None:
        self._progress = LearnerProgress("loading", 0, 1, 0.0)
        self._one = OneThread()
        self._one.begin(_import_learner)  # seconds, in which the relays start

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()

    def progress(self) -> bytes:
        """What it is doing while `start` runs: `LearnerProgress`."""
        return encode(self._progress)

    def start(self, data: bytes) -> bytes:
        """Load or warm-start the model, restore a checkpoint; `LearnerStarted`."""
        return self._one.run(lambda: self._start(decode(LearnerSpec, data)))

    def _start(self, spec: LearnerSpec) -> bytes:
        from laminar_py.relay.store.pages import allow_many_files
        from laminar_py.workers.processes.learner_part import LearnerPart

        _one_thread()
        allow_many_files()
        _log_to(spec.run_dir, f"learner-{spec.rank}")
        self._part = LearnerPart(spec, self._note)
        return encode(self._part.started())

    def _note(self, progress: LearnerProgress) -> None:
        self._progress = progress

    def step(self, data: bytes) -> bytes:
        """One optimizer step and its publication; `StepOutcome`."""
        return self._one.run(lambda: encode(self._part.step(decode(StepRequest, data))))

    def publish(self, version: int) -> float:
        """Publish the weights as they are; seconds that the learner stood still."""
        return self._one.run(lambda: self._part.publish(version))

    def sealed(self, version: int) -> bytes:
        """`Published`, once that version is complete."""
        return encode(self._part.sealed(version))

    def save(self, path: str) -> None:
        """Begin a checkpoint in a folder; the state is copied when this returns."""
        self._one.run(lambda: self._part.save(Path(path)))

    def saved(self) -> None:
        """Return when that checkpoint is complete on disk."""
        self._part.saved()


class ScorerActor:
    """A scoring process; single-threaded, so that a reward function runs in its main thread."""

    def start(self, data: bytes) -> int:
        """Load the reward function; its process id."""
        from laminar_py.data.tokenizer import load_tokenizer
        from laminar_py.reward.registry import load_reward
        from laminar_py.reward.worker import ScoringWorker

        spec = decode(ScorerSpec, data)
        _log_to(spec.run_dir, f"scorer-{spec.index}")
        config = RunConfig.model_validate_json(spec.config)
        reward = config.reward
        function = load_reward(reward.function, pattern=reward.pattern)
        self._tokenizer = load_tokenizer(config.model.path)
        self._worker = ScoringWorker(function, timeout_s=reward.timeout_s)
        return os.getpid()

    def score(self, data: bytes) -> bytes:
        """A list of `Score` for a list of `ScoringRequest`, whose texts are made here."""
        requests = [
            msgspec.structs.replace(request, response=self._tokenizer.decode(request.response_ids))
            for request in decode(list[ScoringRequest], data)
        ]
        return encode(self._worker.score(requests))


class ReferenceActor:
    """The reference model in a process of its own. Calls come on threads, as those of a learner do."""

    def __init__(self) -> None:
        self._one = OneThread()

    def start(self, data: bytes) -> int:
        """Load the model; its process id."""
        self._one.run(lambda: self._start(decode(ReferenceSpec, data)))
        return self.pid()

    def _start(self, spec: ReferenceSpec) -> None:
        from laminar_py.workers.processes.reference_part import ReferencePart

        _one_thread()
        _log_to(spec.run_dir, "reference-0")
        self._part = ReferencePart(spec)

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()

    def logprobs(self, data: bytes) -> bytes:
        """`ReferenceAnswer` for a list of `Trajectory`."""
        return self._one.run(lambda: encode(self._part.logprobs(decode(list[Trajectory], data))))
