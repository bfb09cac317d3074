"""The scoring stage's processes as scorers. Owned by the controller.

A process that died or hangs is replaced here; what it had is scored again (law 6).
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from laminar_py.records.codec import encode
from laminar_py.records.pieces import TokensRef
from laminar_py.records.protocols import ScorerHandle
from laminar_py.records.scoring import Score, Unfinished, Unscored
from laminar_py.records.servers import PoolAddresses
from laminar_py.reward.stage import ScorerDiedError
from laminar_py.runtime.cluster.errors import PartDiedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.processes.scorer import ScorerActor
from laminar_py.runtime.workers.specs import ScorerSpec

START_S, STOP_S = 60.0, 10.0
CALLS = 4  # at the same time of the controller: scores are taken while responses, and servers' addresses, come
MESSAGE_BYTES = 4 << 20  # after which another message begins: tests of a problem may be megabytes
TAKE_S = 10.0  # after which a scorer that has no score says so


class RemoteScorer:
    """A scoring process."""

    def __init__(self, part: Part, at_once: int, payload: PayloadHosts) -> None:
        self._part = part
        self._payload = payload
        self.at_once = at_once

    async def submit_responses(self, responses: Sequence[Unscored]) -> None:
        """Hand responses over. Raises `ScorerDiedError` if the process is gone."""
        located = [msgspec.structs.replace(one, stores=self._stores(one.tokens)) for one in responses]
        try:
            for some in _by_size(located):
                await self._part.call("submit", some)
        except PartDiedError as error:
            raise ScorerDiedError(str(error)) from error

    def look_ahead(self, responses: Sequence[Unfinished]) -> None:
        """Show it the beginnings of responses; where the process is gone, nobody misses it."""
        located = [msgspec.structs.replace(one, stores=self._stores(one.tokens)) for one in responses]
        self._part.send("look_ahead", encode(located))

    def _stores(self, tokens: Sequence[TokensRef]) -> dict[str, str]:
        return self._payload.stores_for((one.at for one in tokens), self._part.place.node)

    async def next_scores(self) -> list[Score]:
        """Scores that are there, once there are any. Raises `ScorerDiedError` if the process is gone or hangs."""
        scores: list[Score] = []
        while not scores:
            try:
                scores = await self._part.ask(list[Score], "take", TAKE_S)
            except PartDiedError as error:
                raise ScorerDiedError(str(error)) from error
        return scores


def _by_size(requests: Sequence[Unscored]) -> Iterator[bytes]:
    """Messages of these: all in one, or so many in each that the last of them takes it to `MESSAGE_BYTES`."""
    some, size = list[msgspec.Raw](), 0
    for request in map(encode, requests):
        some.append(msgspec.Raw(request))
        size += len(request)
        if size >= MESSAGE_BYTES:
            yield encode(some)
            some, size = [], 0
    if some:
        yield encode(some)


class Scorers:
    """Processes of the scoring stage."""

    def __init__(self, incarnation: Incarnation, *, payload: PayloadHosts) -> None:
        self._incarnation = incarnation
        self._payload = payload
        workers = range(incarnation.config.reward.workers)
        self._at_once = [1 for _ in workers]
        self._addresses = PoolAddresses(0, {})
        self._keepers = [Keeper(self._spec(index), incarnation) for index in workers]

    def spawn(self) -> None:
        """Start all processes; `start` starts what runs in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def start(self) -> list[ScorerHandle]:
        """Start what runs in the processes, in all at once."""
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self._scorer(index)) for index in range(len(self._keepers))]
        return [task.result() for task in started]

    async def restart(self, index: int) -> ScorerHandle:
        """End process `index` and start another in its place, which counts among the run's deaths."""
        await self._keepers[index].replace(PartDiedError(f"scorer-{index}", "died or hung"))
        return await self._scorer(index)

    def tell(self, addresses: PoolAddresses) -> None:
        """Tell all scorers, and those to come, which launched servers are up."""
        self._addresses = addresses
        for keeper in self._keepers:
            for part in keeper.parts:
                part.send("reach", encode(addresses))

    async def close(self) -> None:
        """Have scorers end what they hold; of one that cannot, the next sandbox on its machine clears it away."""

        async def stop(part: Part) -> None:
            with suppress(PartDiedError):
                await part.call("stop", timeout_s=STOP_S)

        await asyncio.gather(*(stop(part) for keeper in self._keepers if keeper.is_up for part in keeper.parts))

    async def _scorer(self, index: int) -> ScorerHandle:
        (part,) = await self._keepers[index].up()
        return RemoteScorer(part, self._at_once[index], self._payload)

    def _spec(self, index: int) -> PartSpec:
        return PartSpec(
            names=[f"scorer-{index}"],
            actor=self._incarnation.kinds.scorer or ScorerActor,
            concurrency=CALLS,
            timeout_s=START_S,
            places=lambda: [self._incarnation.placement.of_scorer(index)],
            start=partial(self._start, index),
        )

    async def _start(self, index: int, parts: Sequence[Part]) -> None:
        config, run = self._incarnation.config, self._incarnation.run
        spec = ScorerSpec(
            config=config.model_dump_json(),
            run_dir=str(run.path),
            index=index,
            label=await self._payload.label(f"scorer-{index}", parts[0].place.node),
            store_key=self._payload.key,
        )
        at_once = await parts[0].call("start", encode(spec))
        parts[0].send("reach", encode(self._addresses))
        assert isinstance(at_once, int)
        self._at_once[index] = at_once
