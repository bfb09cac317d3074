"""Processes of the scoring stage, and of servers that the run launches for its terms. Owned by the controller.

A scorer that crashed or hangs is replaced, and its responses are scored again (law 6). Scorers learn of each start
and each crash of a server, so a call goes to a live server, or waits for one
(`tests/workers/test_scorers.py`).
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from laminar_py.config.reward import server_name
from laminar_py.records.scoring import PoolAddresses, Score, ServerAddress, Unscored
from laminar_py.reward.stage import ScorerCrashedError, ScorerHandle
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.placement import NodeSlot
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, KeeperGroup
from laminar_py.runtime.workers.segments import RunSegments
from laminar_py.runtime.workers.specs import ScorerSpec, ServerStart

START_S, STOP_S = 60.0, 10.0
TAKE_S = 10.0  # after which a scorer without scores answers
SERVER_START_S = 120.0  # for the process beside a server


class RemoteScorer:
    """Calls one scoring process, which scores `concurrency` responses at a time; a `ScorerHandle`."""

    def __init__(self, part: Part, concurrency: int) -> None:
        self._part = part
        self.concurrency = concurrency

    async def submit_responses(self, responses: Sequence[Unscored]) -> None:
        """Send responses to the scorer. Raises `ScorerCrashedError` if the process is gone."""
        try:
            await self._part.call("submit_responses", list(responses))
        except PartCrashedError as error:
            raise ScorerCrashedError(str(error)) from error

    async def next_scores(self) -> list[Score]:
        """Wait for scores, and return them. Raises `ScorerCrashedError` if the process is gone or hangs."""
        scores: list[Score] = []
        while not scores:
            try:
                scores = await self._part.call_for(list[Score], "next_scores", TAKE_S)
            except PartCrashedError as error:
                raise ScorerCrashedError(str(error)) from error
        return scores


class ScorerKeeper(Keeper):
    """Keeps one scoring process alive."""

    actor_class = "laminar_py.runtime.workers.processes.scorer:ScorerActor"
    timeout_s = START_S

    def __init__(self, incarnation: Incarnation, index: int, segments: RunSegments) -> None:
        super().__init__(incarnation, f"scorer-{index}")
        self.addresses = PoolAddresses(0, {})
        self.responses_at_once = 1
        self._index = index
        self._segments = segments

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the place of the process: its index chooses among the nodes of the run."""
        return [self._placement.scorer_place(self._index)]

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Start a scorer in its process, send it the addresses of the servers, and note its concurrency."""
        spec = ScorerSpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            index=self._index,
            label=self._segments.new_label(f"scorer-{self._index}"),
        )
        responses_at_once = await parts[0].call("start", spec)
        assert isinstance(responses_at_once, int)
        self.responses_at_once = responses_at_once
        self.publish_addresses(self.addresses)

    def publish_addresses(self, addresses: PoolAddresses) -> None:
        """Send the scorer, and each later process of it, the addresses of the launched servers that are up."""
        self.addresses = addresses
        for part in self.parts:
            part.send("reach", addresses)


class Scorers(KeeperGroup[ScorerKeeper]):
    """Keeps the processes of the scoring stage, which `restart` replaces."""

    def __init__(self, incarnation: Incarnation, *, segments: RunSegments) -> None:
        workers = range(incarnation.config.reward.workers)
        super().__init__(ScorerKeeper(incarnation, index, segments) for index in workers)

    async def start(self) -> list[ScorerHandle]:
        """Start all scorers at the same time, and return handles to call them. Raises an ExceptionGroup."""
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self._bring_up(keeper)) for keeper in self.keepers]
        return [task.result() for task in started]

    async def restart(self, index: int) -> ScorerHandle:
        """Replace process `index`, which counts as a crash, and return the new scorer."""
        await self.keepers[index].replace(PartCrashedError(f"scorer-{index}", "crashed or hung"))
        return await self._bring_up(self.keepers[index])

    def publish_addresses(self, addresses: PoolAddresses) -> None:
        """Send all present and later scorers the addresses of the launched servers that are up."""
        for keeper in self.keepers:
            keeper.publish_addresses(addresses)

    async def close(self) -> None:
        """Have scorers end their processes and sandboxes; the next sandbox on a machine removes leftovers."""

        async def stop(part: Part) -> None:
            with suppress(PartCrashedError):
                await part.call("stop", timeout_s=STOP_S)

        await asyncio.gather(*(stop(part) for keeper in self.keepers if keeper.is_up for part in keeper.parts))

    async def _bring_up(self, keeper: ScorerKeeper) -> ScorerHandle:
        (part,) = await keeper.bring_up()
        return RemoteScorer(part, keeper.responses_at_once)


# ---- servers that terms of the reward ask


class ServerKeeper(Keeper):
    """Keeps a server of a reward pool alive, with the process beside it; `place` is its index in the plan."""

    actor_class = "laminar_py.runtime.workers.processes.services:ServerActor"
    timeout_s = 60.0
    first_starts = 2

    def __init__(
        self, incarnation: Incarnation, place: int, pool: str, index: int, *, publish: Callable[[], None]
    ) -> None:
        super().__init__(incarnation, server_name(pool, index))
        self.pool = pool
        self.address: ServerAddress | None = None  # of a server that is up
        self.memory_advice = f"lower mem-fraction-static or max-total-tokens in reward.servers.{pool}.flags"
        self._place = place
        self._index = index
        self._publish = publish

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the server's place in the plan."""
        return [self._placement.plan.servers[self._place]]

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Start a server of a pool on its node, and publish its address to all scorers."""
        node = parts[0].place.node
        assert node is not None, "a plan names a node for every part"
        spec = ServerStart(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            pool=self.pool,
            index=self._index,
            host=self._placement.ip(node),  # loopback where the run is on this machine alone
        )
        limit_s = SERVER_START_S + self._config.reward.servers[self.pool].start_timeout_s
        self.address = await parts[0].call_for(ServerAddress, "start", spec, timeout_s=limit_s)
        self._publish()

    async def clean_up(self, error: PartCrashedError) -> PartCrashedError:
        """Withdraw the address of a crashed server from all scorers; return the crash, which counts."""
        if self.address is not None:
            self.address = None
            self._publish()
        return error


class RewardServers(KeeperGroup[ServerKeeper]):
    """Keeps the servers of all pools alive; `publish` gets the addresses of live servers after each change."""

    def __init__(self, incarnation: Incarnation, *, publish: Callable[[PoolAddresses], None]) -> None:
        self._publish = publish
        self._number = 0
        super().__init__(
            ServerKeeper(incarnation, place, pool, index, publish=self._publish_all)
            for place, (pool, index) in enumerate(incarnation.config.reward.launched)
        )

    def _publish_all(self) -> None:
        """Publish the addresses of all live servers by pool, under a higher number than before."""
        self._number += 1
        pools: dict[str, list[ServerAddress]] = {}
        for keeper in self.keepers:
            if keeper.address is not None:
                pools.setdefault(keeper.pool, []).append(keeper.address)
        self._publish(PoolAddresses(self._number, pools))
