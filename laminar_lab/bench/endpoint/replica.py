"""The replica's process of `laminar bench endpoint`: the replica of a run, and its engine's own stream.

Turns have given lengths, whatever is sampled. What the engine was asked for agents it is asked again with nothing
between, by as many consumers in this process. Invariant: both times it has the same requests, in the same batches
where they come as they did, and keeps the same KV cache between turns.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from laminar_lab.bench.endpoint.conversations import Timed
from laminar_lab.bench.turns.replica import BenchReplicaActor
from laminar_py.engines.local import LocalEngine, ModelSpec, Scheduler
from laminar_py.records import Delta, EngineLostError, FinishReason, GenerateRequest
from laminar_py.records.codec import IntArray, decode, encode
from laminar_py.records.replica import Assignment

STREAM_INTERVAL = 32  # tokens that a stream gathers to which nobody listens: that of an engine by default


class SpokenRound(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories of agents that speak at the same time, and the tokens of each turn."""

    assignments: list[Assignment]
    lengths: list[list[int]]


class RoundAlone(msgspec.Struct, frozen=True, kw_only=True):
    """A round of that name again, without agents, token by token or not."""

    name: str
    lengths: list[list[int]]
    streams: bool


class FixedTurnScheduler(Scheduler):
    """Scheduler of turns that end at a given length: as by a stop token, so that their KV cache is kept."""

    def _end(self, slot: int, finish_reason: FinishReason) -> None:
        super()._end(slot, FinishReason.STOP if finish_reason is FinishReason.LENGTH else finish_reason)


class FixedTurnEngine(LocalEngine):
    """The embedded engine, with turns of given lengths; what it was asked stays in `asked`, by trajectory."""

    def __init__(self, model_dir: Path, *, max_batch: int, max_len: int, kv_capacity: int) -> None:
        super().__init__(model_dir, max_batch=max_batch, max_len=max_len, kv_capacity=kv_capacity)
        self._scheduler = FixedTurnScheduler(
            ModelSpec.read(model_dir),
            num_slots=max_batch,
            max_len=max_len,
            kv_capacity=kv_capacity,
            stream_interval=STREAM_INTERVAL,
            device=torch.device("cpu"),
        )

    def begin(self, round: SpokenRound) -> None:
        """Give the turns of these trajectories their lengths."""
        names = [assignment.trajectory_id for assignment in round.assignments]
        self._lengths = dict(zip(names, round.lengths, strict=True))
        self.asked: dict[str, list[GenerateRequest]] = {name: [] for name in names}

    def follow(self, request: GenerateRequest, hear: Callable[[Delta | EngineLostError], None]) -> None:
        """See `PushEngine.follow`."""
        asked = self.asked[request.rid]
        asked.append(request)
        self.turn(request, self._lengths[request.rid][len(asked) - 1], hear)

    def turn(self, request: GenerateRequest, length: int, hear: Callable[[Delta | EngineLostError], None]) -> None:
        """The engine's own stream of a turn of so many tokens."""
        most = len(request.prefix_ids) + length
        sampling = msgspec.structs.replace(request.sampling, stop_ids=(), max_new_tokens=most)
        super().follow(msgspec.structs.replace(request, sampling=sampling), hear)

    async def whole_turn(self, request: GenerateRequest, length: int) -> tuple[float, IntArray]:
        """Time at which the first token of a turn was here, and all of its tokens."""
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

        self.turn(request, length, hear)
        await ended
        return arrived[0][0], np.concatenate([ids for _, ids in arrived])


class FixedTurnReplicaActor(BenchReplicaActor):
    """Shell of the process."""

    async def start(self, data: bytes) -> None:
        """Return once the replica serves."""
        _, self._engine = await self.open(data, FixedTurnEngine)
        self._asked: dict[str, list[list[GenerateRequest]]] = {}  # of a round, by its name
        self._times = 0

    async def speak(self, data: bytes) -> bytes:
        """Run a `SpokenRound` to its end."""
        round = decode(SpokenRound, data)
        self._engine.begin(round)
        await self.run_all(round.assignments)
        name = round.assignments[0].trajectory_id.rpartition("-")[0]
        self._asked[name] = list(self._engine.asked.values())
        return b""

    async def alone(self, data: bytes) -> bytes:
        """`Timed` of a `RoundAlone`."""
        again = decode(RoundAlone, data)
        self._times += 1
        began = time.monotonic()
        consumed = [
            self._consume(
                [msgspec.structs.replace(one, rid=f"alone-{self._times}.{place}") for one in asked],
                lengths,
                streams=again.streams,
            )
            for place, (asked, lengths) in enumerate(zip(self._asked[again.name], again.lengths, strict=True))
        ]
        first_s = await asyncio.gather(*consumed)
        return encode(Timed(wall_s=time.monotonic() - began, first_s=first_s))

    async def _consume(
        self, asked: Sequence[GenerateRequest], lengths: Sequence[int], *, streams: bool
    ) -> list[float]:
        """Seconds to the first token of each turn; each goes on behind what the one before it was given."""
        found: list[float] = []
        prefix = asked[0].prefix_ids
        told = len(prefix)  # tokens of what was asked that are in `prefix`, or stand for others there
        for request, length in zip(asked, lengths, strict=True):
            prefix = np.concatenate([prefix, request.prefix_ids[told:]])
            began = time.monotonic()
            turn = msgspec.structs.replace(request, prefix_ids=prefix, one_by_one=streams)
            first_s, ids = await self._engine.whole_turn(turn, length)
            found.append(first_s - began)
            prefix = np.concatenate([prefix, ids])
            told = len(request.prefix_ids) + length
        return found
