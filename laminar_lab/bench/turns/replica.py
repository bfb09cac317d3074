"""The replica's process of `laminar bench turns` and `laminar bench endpoint`: a run's replica, and a replay.

The replica, its streams, its segment and its way to environments are the ones of a run. Its weights come from a
folder, its reports stay in the process, and each turn has a given number of tokens. After a round the engine
answers the same requests again by its own stream, without replica, environments and agents: same lengths, same
batches where requests come at the same moments, same KV cache between turns.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from laminar_py.config import RunConfig
from laminar_py.config.rollout import OnNewWeights
from laminar_py.engines.local import Job, LocalEngine, ModelSpec, Scheduler
from laminar_py.records import Delta, EngineLostError, FinishReason, GenerateRequest
from laminar_py.records.codec import IntArray, decode, encode
from laminar_py.records.host import SystemClock
from laminar_py.records.replica import Assignment
from laminar_py.records.weights import PulledVersion
from laminar_py.relay import RelayKeys, peer_sockets
from laminar_py.rollout import Replica, SegmentStore
from laminar_py.runtime.cluster import LOOPBACK, Part
from laminar_py.runtime.workers import (
    REPLICA_NICENESS,
    EnvironmentActor,
    EnvironmentSpec,
    PartActor,
    PayloadStart,
    RemoteEnvironments,
    open_folder,
    open_part,
    open_reader,
)

QUIET_S = 0.2  # between reports without news
STREAM_INTERVAL = 32  # tokens that a stream without listeners gathers; an engine's default
VERSION = 0
PATIENCE_S = 240.0


class BenchReplicaSpec(PayloadStart, frozen=True, kw_only=True):
    """Start of the process."""

    public_key: str
    secret_key: str


class PlayRound(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories of a round, and the number of tokens in each of their turns."""

    name: str
    assignments: list[Assignment]
    lengths: list[list[int]]
    at_once: bool  # all at the same time, or one after another


class ReplayRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round of that name again by the engine alone, token by token where it streams."""

    name: str
    streams: bool


class TimedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round, e.g. `TimedRound(wall_s=9.5, first_s=[[0.02, 0.01], [0.03, 0.01]])`: two agents of two turns."""

    wall_s: float  # from the first request to the last token
    first_s: list[list[float]]  # of each turn; in a replay from its request on, in a play on this host's clock


class FixedTurnScheduler(Scheduler):
    """Scheduler whose turns end at a given length as if by a stop token, so that their KV cache is kept."""

    def _end(self, job: Job, finish_reason: FinishReason) -> None:
        super()._end(job, FinishReason.STOP if finish_reason is FinishReason.LENGTH else finish_reason)


class ReplayEngine(LocalEngine):
    """The embedded engine with turns of given lengths. It keeps the requests of a round in `requests`."""

    def __init__(self, model_dir: Path, *, max_batch: int, max_len: int, kv_capacity: int) -> None:
        super().__init__(model_dir, max_batch=max_batch, max_len=max_len, kv_capacity=kv_capacity)
        self._scheduler = FixedTurnScheduler(
            ModelSpec.read(model_dir),
            num_slots=max_batch,
            max_len=max_len,
            kv_capacity=kv_capacity,
            stream_interval=STREAM_INTERVAL,
        )

    def begin(self, play: PlayRound) -> None:
        """Give the turns of these trajectories their lengths, and forget the requests before."""
        names = [assignment.trajectory_id for assignment in play.assignments]
        self._lengths = dict(zip(names, play.lengths, strict=True))
        self.requests: dict[str, list[GenerateRequest]] = {name: [] for name in names}
        self.first_s: dict[str, list[float]] = {name: [] for name in names}  # arrival of each turn's first token

    def follow(self, request: GenerateRequest, hear: Callable[[Delta | EngineLostError], None]) -> None:
        """See `PushEngine.follow`."""
        requests, first_s = self.requests[request.rid], self.first_s[request.rid]
        requests.append(request)
        number = len(requests)

        def clocked(news: Delta | EngineLostError) -> None:
            if len(first_s) < number and isinstance(news, Delta) and len(news.ids):
                first_s.append(time.monotonic())
            hear(news)

        self.start_turn(request, self._lengths[request.rid][number - 1], clocked)

    def start_turn(
        self, request: GenerateRequest, length: int, hear: Callable[[Delta | EngineLostError], None]
    ) -> None:
        """Start the engine's own stream for a turn with so many tokens."""
        most = len(request.prefix_ids) + length
        sampling = msgspec.structs.replace(request.sampling, stop_ids=(), max_new_tokens=most)
        super().follow(msgspec.structs.replace(request, sampling=sampling), hear)

    async def run_turn(self, request: GenerateRequest, length: int) -> tuple[float, IntArray]:
        """Run a turn; return the moment of its first token, and all its tokens."""
        arrived: list[tuple[float, IntArray]] = []
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hear(news: Delta | EngineLostError) -> None:
            if isinstance(news, EngineLostError):
                ended.set_exception(news)
                return
            if len(news.ids):
                arrived.append((time.monotonic(), news.ids))
            if news.finish_reason is not None:
                ended.set_result(None)

        self.start_turn(request, length, hear)
        await ended
        return arrived[0][0], np.concatenate([ids for _, ids in arrived])


class OneVersion:
    """Weights of a folder, without any newer version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def latest(self) -> int:
        """See `WeightSource.latest`."""
        return VERSION

    async def wait_newer(self, version: int) -> int:
        """See `WeightSource.wait_newer`."""
        if version >= VERSION:
            await asyncio.Event().wait()
        return VERSION

    async def pull(self, version: int | None = None) -> PulledVersion:
        """See `WeightSource.pull`."""
        return PulledVersion(VERSION, str(self._folder), "")


class BenchReplicaActor(PartActor):
    """Shell of the replica's process."""

    async def start(self, data: bytes) -> None:
        """Return once the replica serves, for a `BenchReplicaSpec`."""
        spec = decode(BenchReplicaSpec, data)
        config = open_part(spec, "replica-0")
        rollout = config.rollout
        torch.set_num_threads(1)
        if rollout.engine.yields_cpus:
            os.nice(REPLICA_NICENESS)
        wire = peer_sockets(RelayKeys(spec.public_key, spec.secret_key))
        self._engine = ReplayEngine(
            config.model.path,
            max_batch=rollout.max_batch,
            max_len=rollout.max_len,
            kv_capacity=rollout.kv_tokens,
        )
        await self._engine.start()
        self._replica = Replica(
            0,
            engine=self._engine,
            weights=OneVersion(config.model.path),
            store=SegmentStore(open_folder(spec), spec.label, open_reader(spec)),
            clock=SystemClock(),
            on_new_weights=OnNewWeights.DRAIN,
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=rollout.partial_interval_s,
            environments=RemoteEnvironments(Path(spec.run_dir), 1, wire, spec.label),
        )
        self._task = asyncio.create_task(self._replica.run(), name="replica")
        self._played: dict[str, tuple[PlayRound, list[list[GenerateRequest]]]] = {}
        self._replays = 0
        while not (await self._replica.next_report(QUIET_S)).admissible:
            pass

    async def play(self, data: bytes) -> bytes:
        """Run a `PlayRound` to the end that its environments give each trajectory; a `TimedRound`."""
        play = decode(PlayRound, data)
        self._engine.begin(play)
        began = time.monotonic()
        batches = [play.assignments] if play.at_once else [[assignment] for assignment in play.assignments]
        for batch in batches:
            await self._run(batch)
        self._played[play.name] = play, list(self._engine.requests.values())
        return encode(TimedRound(wall_s=time.monotonic() - began, first_s=list(self._engine.first_s.values())))

    async def _run(self, assignments: Sequence[Assignment]) -> None:
        """Start the assignments and wait for their ends. Fails where a trajectory fails or ends early."""
        left = {assignment.trajectory_id for assignment in assignments}
        self._replica.start_assignments(list(assignments))
        while left:
            for progress in (await self._replica.next_report(QUIET_S)).progress:
                name, reason = progress.trajectory_id, progress.finish_reason
                assert progress.failure is None, f"{name}: {progress.detail}"
                if reason is not None:
                    assert reason is FinishReason.STOP, f"{name}: {reason}"
                    left.discard(name)

    async def replay(self, data: bytes) -> bytes:
        """Answer the requests of a round again by the engine alone, for a `ReplayRound`; a `TimedRound`."""
        again = decode(ReplayRound, data)
        play, requests = self._played[again.name]
        self._replays += 1
        began = time.monotonic()
        consumers = [
            self._consume(
                [msgspec.structs.replace(turn, rid=f"alone-{self._replays}.{index}") for turn in turns],
                lengths,
                streams=again.streams,
            )
            for index, (turns, lengths) in enumerate(zip(requests, play.lengths, strict=True))
        ]
        first_s = await asyncio.gather(*consumers) if play.at_once else [await consumer for consumer in consumers]
        return encode(TimedRound(wall_s=time.monotonic() - began, first_s=first_s))

    async def _consume(
        self, requests: Sequence[GenerateRequest], lengths: Sequence[int], *, streams: bool
    ) -> list[float]:
        """Run the turns of a trajectory, each behind the turn before; return seconds to first tokens."""
        first_tokens_s: list[float] = []
        prefix = requests[0].prefix_ids
        num_known = len(prefix)  # leading tokens of the recorded prefix that `prefix` has, or has others for
        for request, length in zip(requests, lengths, strict=True):
            prefix = np.concatenate([prefix, request.prefix_ids[num_known:]])
            began = time.monotonic()
            turn = msgspec.structs.replace(request, prefix_ids=prefix, one_by_one=streams)
            first_s, ids = await self._engine.run_turn(turn, length)
            first_tokens_s.append(first_s - began)
            prefix = np.concatenate([prefix, ids])
            num_known = len(request.prefix_ids) + length
        return first_tokens_s


class BenchParts:
    """A replica and a process of environments, e.g. `BenchParts(folder)`, within an open cluster."""

    def __init__(self, run: Path) -> None:
        self._run = run
        (run / "logs").mkdir(parents=True)
        self._environment = Part("environment-0", EnvironmentActor, concurrency=4, timeout_s=PATIENCE_S)
        self._replica = Part("replica-0", BenchReplicaActor, concurrency=8, timeout_s=PATIENCE_S)

    async def start(self, config: RunConfig, *, messages: bool) -> None:
        """Return once both serve; prompts are `messages`, or text."""
        given, run_dir = config.model_dump_json(), str(self._run)
        keys = RelayKeys.generate()
        pair = {"public_key": keys.public, "secret_key": keys.secret}
        environment = EnvironmentSpec(
            config=given, run_dir=run_dir, index=0, messages=messages, host=LOOPBACK, **pair
        )
        replica = BenchReplicaSpec(
            config=given,
            run_dir=run_dir,
            label="replica-0",
            store_key=secrets.token_hex(32),
            **pair,
        )
        await self._environment.call("start", encode(environment))
        await self._replica.call("start", encode(replica))

    async def play(self, play: PlayRound) -> TimedRound:
        """Run a round through replica and environments."""
        return await self._replica.call_for(TimedRound, "play", encode(play))

    async def replay(self, name: str, *, streams: bool) -> TimedRound:
        """Have the engine answer a round again by itself."""
        return await self._replica.call_for(TimedRound, "replay", encode(ReplayRound(name=name, streams=streams)))
