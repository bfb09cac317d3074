"""A replica's process of `bench.turns`: the replica of a run, and when its turns had their first token.

The replica, its streams, its segment and its way to environments are those of a run. Its engine is the embedded
one, with a clock; its weights come from a folder; its reports stay here. Nothing of these is on the way of a turn.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from laminar_py.config import RunConfig
from laminar_py.config.rollout import OnNewWeights
from laminar_py.engines.local import LocalEngine, ModelSpec, Scheduler
from laminar_py.records import Delta, EngineLostError, FinishReason, GenerateRequest
from laminar_py.records.codec import decode, encode
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
PAUSE_S = 0.005  # before what is computed alone: whoever never waits is held up more by others of a busy machine
VERSION = 0
EngineT = TypeVar("EngineT", bound=LocalEngine)


class ClockedReplicaSpec(PayloadStart, frozen=True, kw_only=True):
    """Start of the process."""

    public_key: str
    secret_key: str


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories to run one after the other, on an engine that keeps KV cache between turns or does not."""

    assignments: list[Assignment]
    keeps: bool


class PlayedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn: when its first token was in the replica's hands, and what the engine alone takes for it."""

    first_s: float  # on this host's monotonic clock
    alone_s: float


Played = dict[str, list[PlayedTurn]]  # by trajectory


class ClockedEngine(LocalEngine):
    """The embedded engine, and what it was asked for since `begin`."""

    def begin(self, *, keeps: bool) -> None:
        """Keep KV cache between turns from here on, or keep none."""
        self._keeps = keeps
        self.requests: list[GenerateRequest] = []
        self.first_s: list[float] = []  # when the first token of each was here

    def follow(self, request: GenerateRequest, hear: Callable[[Delta | EngineLostError], None]) -> None:
        """See `PushEngine.follow`."""
        request = msgspec.structs.replace(request, has_turns=request.has_turns and self._keeps)
        self.requests.append(request)
        number = len(self.requests)

        def clocked(news: Delta | EngineLostError) -> None:
            if len(self.first_s) < number and isinstance(news, Delta) and len(news.ids):
                self.first_s.append(time.monotonic())
            hear(news)

        super().follow(request, clocked)


class EngineAlone:
    """Computation of the embedded engine, without the thread that it otherwise has."""

    def __init__(self, config: RunConfig) -> None:
        room = config.rollout
        self._scheduler = Scheduler(
            ModelSpec.read(config.model.path),
            num_slots=room.max_batch,
            max_len=room.max_len,
            kv_capacity=room.kv_tokens,
            stream_interval=1,
            device=torch.device("cpu"),
        )
        self._scheduler.load_weights(config.model.path, VERSION)

    def take(self, requests: Sequence[GenerateRequest]) -> list[float]:
        """Seconds of prefill and first token of each request, which ends with that, one after the other."""
        torch.set_flush_denormal(True)  # of this thread, as of an engine's
        found = []
        with torch.inference_mode():
            for ticket, request in enumerate(requests):
                time.sleep(PAUSE_S)
                began = time.monotonic()
                self._scheduler.add_request(ticket, request)
                while not self._scheduler.take_deltas():
                    self._scheduler.step()
                found.append(time.monotonic() - began)
        return found


class OneVersion:
    """Weights of a folder, of which there is never a newer version."""

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
    """Shell of a process whose replica serves the weights of a folder; its reports stay here."""

    async def open(self, data: bytes, kind: Callable[..., EngineT]) -> tuple[RunConfig, EngineT]:
        """Return once the replica serves, with an engine of that kind, for a `ClockedReplicaSpec`."""
        spec = decode(ClockedReplicaSpec, data)
        config = open_part(spec, "replica-0")
        rollout = config.rollout
        torch.set_num_threads(1)
        if rollout.engine.yields_cpus:
            os.nice(REPLICA_NICENESS)
        wire = peer_sockets(RelayKeys(spec.public_key, spec.secret_key))
        engine = kind(
            config.model.path,
            max_batch=rollout.max_batch,
            max_len=rollout.max_len,
            kv_capacity=rollout.kv_tokens,
        )
        await engine.start()
        self._replica = Replica(
            0,
            engine=engine,
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
        while not (await self._replica.next_report(QUIET_S)).admissible:
            pass
        return config, engine

    async def run_all(self, assignments: Sequence[Assignment]) -> None:
        """Run trajectories at a time, to the end that their environments give them."""
        left = {assignment.trajectory_id for assignment in assignments}
        self._replica.start_assignments(list(assignments))
        while left:
            for progress in (await self._replica.next_report(QUIET_S)).progress:
                name, reason = progress.trajectory_id, progress.finish_reason
                assert progress.failure is None, f"{name}: {progress.detail}"
                if reason is not None:
                    assert reason is FinishReason.STOP, f"{name}: {reason}"
                    left.discard(name)


class ClockedReplicaActor(BenchReplicaActor):
    """Shell of the process of `laminar bench turns`."""

    async def start(self, data: bytes) -> None:
        """Return once the replica serves."""
        config, self._engine = await self.open(data, ClockedEngine)
        self._alone = EngineAlone(config)

    async def play(self, data: bytes) -> bytes:
        """`Played` of a `Play`."""
        play = decode(Play, data)
        played: Played = {}
        for assignment in play.assignments:
            self._engine.begin(keeps=play.keeps)
            await self.run_all([assignment])
            alone = await asyncio.to_thread(self._alone.take, self._engine.requests)
            played[assignment.trajectory_id] = [
                PlayedTurn(first_s=first, alone_s=taken)
                for first, taken in zip(self._engine.first_s, alone, strict=True)
            ]
        return encode(played)


PATIENCE_S = 240.0


class TurnParts:
    """A replica and a process of environments, e.g. `TurnParts(folder, ClockedReplicaActor)`, in a Ray cluster."""

    def __init__(self, run: Path, replica: type[BenchReplicaActor]) -> None:
        self._run = run
        (run / "logs").mkdir(parents=True)
        self._environment = Part("environment-0", EnvironmentActor, concurrency=4, timeout_s=PATIENCE_S)
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
            **pair,
        )
        await self._environment.call("start", encode(environment))
        await self.replica.call("start", encode(replica))
