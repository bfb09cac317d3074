"""Processes of the scoring stage, and of servers that the run launches for its terms. Owned by the controller.

A scorer that crashed or hangs is replaced, and its responses are scored again (law 6). Scorers learn of each start
and each crash of a server, so a call goes to a live server, or waits for one
(`tests/workers/test_scorers.py`).
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from laminar_py.config.reward import server_name
from laminar_py.records.codec import encode
from laminar_py.records.pieces import TokensRef
from laminar_py.records.scoring import PoolAddresses, Score, ServerAddress, Unscored
from laminar_py.reward.stage import ScorerCrashedError, ScorerHandle
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.specs import ScorerSpec, ServerStart

START_S, STOP_S = 60.0, 10.0
CALLS = 4  # at once: one for scores, others for responses and for addresses of servers
MESSAGE_BYTES = 4 << 20  # size after which another message begins: tests of a problem may take megabytes
TAKE_S = 10.0  # after which a scorer without scores answers
SERVER_START_S = 120.0  # for the process beside a server
SERVER_WATCH_S = 10.0  # length of one call that watches a server
SERVER_PATIENCE_S = 60.0  # for its answer
SERVER_FIRST_STARTS = 2  # failed first starts after which the run ends


class RemoteScorer:
    """Calls one scoring process; see `reward.stage.ScorerHandle`."""

    def __init__(self, part: Part, concurrency: int, payload: PayloadHosts) -> None:
        self._part = part
        self._payload = payload
        self.concurrency = concurrency

    async def submit_responses(self, responses: Sequence[Unscored]) -> None:
        """Send responses to the scorer. Raises `ScorerCrashedError` if the process is gone."""
        located = [
            msgspec.structs.replace(response, stores=self._stores(response.tokens)) for response in responses
        ]
        try:
            for batch in _by_size(located):
                await self._part.call("submit_responses", batch)
        except PartCrashedError as error:
            raise ScorerCrashedError(str(error)) from error

    def _stores(self, tokens: Sequence[TokensRef]) -> dict[str, str]:
        return self._payload.stores_for((ref.at for ref in tokens), self._part.place.node)

    async def next_scores(self) -> list[Score]:
        """Wait for scores, and return them. Raises `ScorerCrashedError` if the process is gone or hangs."""
        scores: list[Score] = []
        while not scores:
            try:
                scores = await self._part.call_for(list[Score], "next_scores", TAKE_S)
            except PartCrashedError as error:
                raise ScorerCrashedError(str(error)) from error
        return scores


def _by_size(requests: Sequence[Unscored]) -> Iterator[bytes]:
    """Yield the responses in messages, each closed as soon as it has `MESSAGE_BYTES`."""
    batch, size = list[msgspec.Raw](), 0
    for request in map(encode, requests):
        batch.append(msgspec.Raw(request))
        size += len(request)
        if size >= MESSAGE_BYTES:
            yield encode(batch)
            batch, size = [], 0
    if batch:
        yield encode(batch)


class Scorers:
    """Keeps the processes of the scoring stage."""

    def __init__(self, incarnation: Incarnation, *, payload: PayloadHosts) -> None:
        self._incarnation = incarnation
        self._payload = payload
        workers = range(incarnation.config.reward.workers)
        self._concurrency = [1 for _ in workers]
        self._addresses = PoolAddresses(0, {})
        self._keepers = [Keeper(self._spec(index), incarnation) for index in workers]

    def spawn(self) -> None:
        """Start all processes; `start` starts the scorers in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def start(self) -> list[ScorerHandle]:
        """Start the scorers, all at once."""
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self._scorer(index)) for index in range(len(self._keepers))]
        return [task.result() for task in started]

    async def restart(self, index: int) -> ScorerHandle:
        """Replace process `index`, which counts as a crash, and return the new scorer."""
        await self._keepers[index].replace(PartCrashedError(f"scorer-{index}", "crashed or hung"))
        return await self._scorer(index)

    def publish_addresses(self, addresses: PoolAddresses) -> None:
        """Send all present and later scorers the addresses of the launched servers that are up."""
        self._addresses = addresses
        for keeper in self._keepers:
            for part in keeper.parts:
                part.send("reach", addresses)

    async def close(self) -> None:
        """Have scorers end their processes and sandboxes; the next sandbox on a machine removes leftovers."""

        async def stop(part: Part) -> None:
            with suppress(PartCrashedError):
                await part.call("stop", timeout_s=STOP_S)

        await asyncio.gather(*(stop(part) for keeper in self._keepers if keeper.is_up for part in keeper.parts))

    async def _scorer(self, index: int) -> ScorerHandle:
        (part,) = await self._keepers[index].bring_up()
        return RemoteScorer(part, self._concurrency[index], self._payload)

    def _spec(self, index: int) -> PartSpec:
        """Describe the process of a scorer for its keeper."""
        return PartSpec(
            names=[f"scorer-{index}"],
            actor_class=self._incarnation.kinds.scorer
            or "laminar_py.runtime.workers.processes.scorer:ScorerActor",
            concurrency=CALLS,
            timeout_s=START_S,
            places=lambda: [self._incarnation.placement.scorer_place(index)],
            start=partial(self._start, index),
        )

    async def _start(self, index: int, parts: Sequence[Part]) -> None:
        """Start a scorer in its process, send it the addresses of the servers, and note its concurrency."""
        config, run = self._incarnation.config, self._incarnation.run
        spec = ScorerSpec(
            config=config.model_dump_json(),
            run_dir=str(run.path),
            index=index,
            label=await self._payload.new_label(f"scorer-{index}", parts[0].place.node),
            store_key=self._payload.key,
        )
        concurrency = await parts[0].call("start", spec)
        parts[0].send("reach", self._addresses)
        assert isinstance(concurrency, int)
        self._concurrency[index] = concurrency


# ---- servers that terms of the reward ask


class RewardServers:
    """Keeps the servers of all pools; calls `publish` with the live ones whenever these change."""

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
        """Keep all servers alive until cancelled. Raises RunFailedError after too many crashes."""
        async with asyncio.TaskGroup() as tasks:
            for keeper in self._keepers:
                tasks.create_task(keeper.call_with_restarts(self._watch), name="keep-server")

    async def _watch(self, parts: Sequence[Part]) -> None:
        """Watch a server until it crashes. Raises PartCrashedError."""
        (part,) = parts
        while True:
            await part.call("watch", SERVER_WATCH_S)

    def _spec(self, place: int, pool: str, index: int) -> PartSpec:
        """Describe the process beside a server of a pool for its keeper; `place` is its index in the plan."""
        return PartSpec(
            names=[server_name(pool, index)],
            actor_class="laminar_py.runtime.workers.processes.services:ServerActor",
            concurrency=2,
            timeout_s=SERVER_PATIENCE_S,
            places=lambda: [self._incarnation.placement.plan.servers[place]],
            start=partial(self._start, pool, index),
            settle=partial(self._settle, pool, index),
            first_starts=SERVER_FIRST_STARTS,
            spares_memory=f"lower mem-fraction-static or max-total-tokens in reward.servers.{pool}.flags",
        )

    async def _start(self, pool: str, index: int, parts: Sequence[Part]) -> None:
        """Start a server of a pool on its node, and publish its address to all scorers."""
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

    async def _settle(self, pool: str, index: int, error: PartCrashedError) -> PartCrashedError:
        if self._up.pop((pool, index), None) is not None:
            self._publish_all()
        return error

    def _publish_all(self) -> None:
        self._number += 1
        pools: dict[str, list[ServerAddress]] = {}
        for (pool, _), address in self._up.items():
            pools.setdefault(pool, []).append(address)
        self._publish(PoolAddresses(self._number, pools))
