"""The scoring stage's processes as `Scorer`s. Owned by the controller.

A process that died or hangs is replaced here; the stage decides what that means for what it had (law 6).
"""

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from laminar_py.cluster.errors import PartDiedError
from laminar_py.cluster.part import Part
from laminar_py.records.codec import encode
from laminar_py.records.protocols import Scorer
from laminar_py.records.scoring import Begun, Score, ScoringRequest
from laminar_py.reward.begun import begun_path, read_begun
from laminar_py.reward.stage import WorkerDiedError
from laminar_py.workers.incarnation import Incarnation
from laminar_py.workers.keeper import Keeper, PartSpec
from laminar_py.workers.processes.scorer import ScorerActor
from laminar_py.workers.specs import ScorerSpec

START_S = 60.0
HUNG = "ended, as a reward function hung in it"


class RemoteScorer:
    """A scoring process; the stage above it sets the time limits."""

    def __init__(self, part: Part, path: Path) -> None:
        self._part = part
        self._path = path  # of the file in which it says what it begins

    async def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score each request. Raises WorkerDiedError if the process is gone."""
        try:
            return await self._part.ask(list[Score], "score", encode(list(requests)), timeout_s=math.inf)
        except PartDiedError as error:
            raise WorkerDiedError(str(error)) from error

    def begun(self) -> Begun | None:
        """Read what the process has written, which outlives it."""
        return read_begun(self._path)


class Scorers:
    """Processes of the scoring stage."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        workers = range(incarnation.config.reward.workers)
        self._keepers = [Keeper(self._spec(index), incarnation) for index in workers]

    def spawn(self) -> None:
        """Start all processes; `start` starts what runs in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def start(self) -> list[Scorer]:
        """Start what runs in the processes, in all at once."""
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self._scorer(index)) for index in range(len(self._keepers))]
        return [task.result() for task in started]

    async def restart(self, index: int, counts: bool) -> Scorer:
        """End process `index` and start another in its place; one that died counts among the run's deaths."""
        death = PartDiedError(f"scorer-{index}", "died over a reward function" if counts else HUNG)
        await self._keepers[index].replace(death)
        return await self._scorer(index)

    async def _scorer(self, index: int) -> Scorer:
        (part,) = await self._keepers[index].up()
        return RemoteScorer(part, begun_path(self._incarnation.run.path, index))

    def _spec(self, index: int) -> PartSpec:
        return PartSpec(
            names=[f"scorer-{index}"],
            actor=ScorerActor,
            concurrency=1,
            timeout_s=START_S,
            places=lambda: [self._incarnation.placement.of_scorer(index)],
            start=partial(self._start, index),
            settle=self._settle,
        )

    async def _settle(self, death: PartDiedError) -> PartDiedError | None:
        """Let a reward that hangs be no death of its process: the response is dropped for it."""
        return None if death.reason == HUNG else death

    async def _start(self, index: int, parts: Sequence[Part]) -> None:
        config, run = self._incarnation.config, self._incarnation.run
        spec = ScorerSpec(config=config.model_dump_json(), run_dir=str(run.path), index=index)
        await parts[0].call("start", encode(spec))
