"""The scoring stage's processes as scorers. Owned by the controller.

A process that died or hangs is replaced here; what it had is scored again (law 6).
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from laminar_py.config.reward import server_name
from laminar_py.records.codec import encode
from laminar_py.records.pieces import TokensRef
from laminar_py.records.protocols import ScorerHandle
from laminar_py.records.scoring import Score, Unfinished, Unscored
from laminar_py.records.servers import PoolAddresses, ServerAddress
from laminar_py.reward.stage import ScorerDiedError
from laminar_py.runtime.cluster.errors import PartDiedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.specs import ScorerSpec, ServerStart

START_S, STOP_S = 60.0, 10.0
CALLS = 4  # at the same time of the controller: scores are taken while responses, and servers' addresses, come
MESSAGE_BYTES = 4 << 20  # after which another message begins: tests of a problem may be megabytes
TAKE_S = 10.0  # after which a scorer that has no score says so
SERVER_START_S = 120.0  # of the process beside a server
SERVER_WATCH_S = 10.0  # of one look at a server
SERVER_PATIENCE_S = 60.0  # of an answer to that
SERVER_FIRST_STARTS = 2  # that may fail before the run does


class RemoteScorer:
    """A scoring process."""

    def __init__(self, part: Part, at_once: int, payload: PayloadHosts) -> None:
        self._part = part
        self._payload = payload
        self.at_once = at_once

    async def submit(self, responses: Sequence[Unscored]) -> None:
        """Hand responses over. Raises `ScorerDiedError` if the process is gone."""
        located = [msgspec.structs.replace(one, stores=self._stores(one.tokens)) for one in responses]
        try:
            for some in _by_size(located):
                await self._part.call("submit_responses", some)
        except PartDiedError as error:
            raise ScorerDiedError(str(error)) from error

    def look_ahead(self, responses: Sequence[Unfinished]) -> None:
        """Show it the beginnings of responses; where the process is gone, nobody misses it."""
        located = [msgspec.structs.replace(one, stores=self._stores(one.tokens)) for one in responses]
        self._part.send("look_ahead", located)

    def _stores(self, tokens: Sequence[TokensRef]) -> dict[str, str]:
        return self._payload.stores_for((one.at for one in tokens), self._part.place.node)

    async def take(self) -> list[Score]:
        """Scores that are there, once there are any. Raises `ScorerDiedError` if the process is gone or hangs."""
        scores: list[Score] = []
        while not scores:
            try:
                scores = await self._part.call_for(list[Score], "next_scores", TAKE_S)
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

    def publish_addresses(self, addresses: PoolAddresses) -> None:
        """Tell all scorers, and those to come, which launched servers are up."""
        self._addresses = addresses
        for keeper in self._keepers:
            for part in keeper.parts:
                part.send("reach", addresses)

    async def close(self) -> None:
        """Have scorers end what they hold; of one that cannot, the next sandbox on its machine clears it away."""

        async def stop(part: Part) -> None:
            with suppress(PartDiedError):
                await part.call("stop", timeout_s=STOP_S)

        await asyncio.gather(*(stop(part) for keeper in self._keepers if keeper.is_up for part in keeper.parts))

    async def _scorer(self, index: int) -> ScorerHandle:
        (part,) = await self._keepers[index].bring_up()
        return RemoteScorer(part, self._at_once[index], self._payload)

    def _spec(self, index: int) -> PartSpec:
        return PartSpec(
            names=[f"scorer-{index}"],
            actor=self._incarnation.kinds.scorer or "laminar_py.runtime.workers.processes.scorer:ScorerActor",
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
            label=await self._payload.new_label(f"scorer-{index}", parts[0].place.node),
            store_key=self._payload.key,
        )
        at_once = await parts[0].call("start", spec)
        parts[0].send("reach", self._addresses)
        assert isinstance(at_once, int)
        self._at_once[index] = at_once


# ---- servers that terms of the reward ask


class RewardServers:
    """Processes of all pools; `publish` is given what is up whenever that changes."""

    def __init__(self, incarnation: Incarnation, *, publish: Callable[[PoolAddresses], None]) -> None:
        self._incarnation = incarnation
        self._reward = incarnation.config.reward
        self._publish = publish
        self._up = dict[tuple[str, int], ServerAddress]()
        self._number = 0
        launched = enumerate(self._reward.launched)
        self._keepers = [Keeper(self._spec(place, pool, index), incarnation) for place, (pool, index) in launched]

    def spawn(self) -> None:
        """Start all processes; `keep` starts the servers."""
        for keeper in self._keepers:
            keeper.spawn()

    async def keep(self) -> None:
        """Have all servers up until cancelled. Raises RunFailedError if one never starts, or dies too often."""
        async with asyncio.TaskGroup() as tasks:
            for keeper in self._keepers:
                tasks.create_task(keeper.call_with_restarts(self._watch), name="keep-server")

    async def _watch(self, parts: Sequence[Part]) -> None:
        """Serve until the server dies."""
        (part,) = parts
        while True:
            await part.call("watch", SERVER_WATCH_S)

    def _spec(self, place: int, pool: str, index: int) -> PartSpec:
        return PartSpec(
            names=[server_name(pool, index)],
            actor="laminar_py.runtime.workers.processes.services:ServerActor",
            concurrency=2,
            timeout_s=SERVER_PATIENCE_S,
            places=lambda: [self._incarnation.placement.plan.servers[place]],
            start=partial(self._start, pool, index),
            settle=partial(self._settle, pool, index),
            first_starts=SERVER_FIRST_STARTS,
            spares_memory=f"lower mem-fraction-static or max-total-tokens in reward.servers.{pool}.flags",
        )

    async def _start(self, pool: str, index: int, parts: Sequence[Part]) -> None:
        (part,) = parts
        node = part.place.node
        assert node is not None, "a plan names a node for every part"
        spec = ServerStart(
            config=self._incarnation.config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            pool=pool,
            index=index,
            host=self._incarnation.placement.ip(node),  # loopback where the run is on this machine alone
        )
        limit_s = SERVER_START_S + self._reward.servers[pool].start_timeout_s
        self._up[pool, index] = await part.call_for(ServerAddress, "start", spec, timeout_s=limit_s)
        self._publish_all()

    async def _settle(self, pool: str, index: int, error: PartDiedError) -> PartDiedError:
        if self._up.pop((pool, index), None) is not None:
            self._publish_all()
        return error

    def _publish_all(self) -> None:
        self._number += 1
        pools: dict[str, list[ServerAddress]] = {}
        for (pool, _), address in self._up.items():
            pools.setdefault(pool, []).append(address)
        self._publish(PoolAddresses(self._number, pools))
