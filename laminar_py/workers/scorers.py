"""The scoring stage's processes as `Scorer`s. Owned by the controller."""

import asyncio
from collections.abc import Sequence
from functools import partial

from laminar_py.cluster.errors import PartDiedError
from laminar_py.cluster.part import Part
from laminar_py.records.codec import decode, encode
from laminar_py.records.protocols import Scorer
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.reward.stage import WorkerDiedError
from laminar_py.workers.keeper import Keeper, Kept
from laminar_py.workers.processes.scorer import ScorerActor
from laminar_py.workers.site import Site
from laminar_py.workers.specs import ScorerSpec

START_S = 60.0


class RemoteScorer:
    """A scoring process; the stage above it sets the time limits."""

    def __init__(self, part: Part) -> None:
        self._part = part

    async def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score each request. Raises WorkerDiedError if the process is gone."""
        try:
            data = await self._part.call("score", encode(list(requests)), timeout_s=float("inf"))
        except PartDiedError as error:
            raise WorkerDiedError(str(error)) from error
        assert isinstance(data, bytes)
        return decode(list[Score], data)


class Scorers:
    """Processes of the scoring stage."""

    def __init__(self, site: Site) -> None:
        self._config = site.config
        self._run_dir = site.run.path
        self._placement = site.placement
        self._keepers = [Keeper(self._kept(index), site) for index in range(site.config.reward.workers)]

    def spawn(self) -> None:
        """Start all processes; `start` starts what runs in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def start(self) -> list[Scorer]:
        """Start what runs in the processes, in all at once."""
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self._scorer(keeper)) for keeper in self._keepers]
        return [task.result() for task in started]

    async def restart(self, index: int) -> Scorer:
        """End process `index` and start another in its place."""
        death = PartDiedError(f"scorer-{index}", "died or hung over a reward function")
        await self._keepers[index].lost(death)
        return await self._scorer(self._keepers[index])

    async def _scorer(self, keeper: Keeper) -> Scorer:
        (part,) = await keeper.up()
        return RemoteScorer(part)

    def _kept(self, index: int) -> Kept:
        return Kept(
            names=[f"scorer-{index}"],
            actor=ScorerActor,
            concurrency=1,
            timeout_s=START_S,
            places=lambda: [self._placement.of_scorer(index)],
            start=partial(self._start, index),
        )

    async def _start(self, index: int, parts: Sequence[Part]) -> Sequence[int]:
        spec = ScorerSpec(self._config.model_dump_json(), str(self._run_dir), index)
        pid = await parts[0].call("start", encode(spec))
        assert isinstance(pid, int)
        return [pid]
