"""The scoring stage's processes as `Scorer`s. Owned by the controller."""

from collections.abc import Sequence
from pathlib import Path

from laminar_py.cluster.errors import PartDiedError
from laminar_py.cluster.part import Part
from laminar_py.cluster.placement import Placement
from laminar_py.config.run import RunConfig
from laminar_py.records.codec import decode, encode
from laminar_py.records.protocols import Scorer
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.reward.stage import WorkerDiedError
from laminar_py.workers.processes.actors import ScorerActor
from laminar_py.workers.specs import ScorerSpec
from laminar_py.workers.supervisor import Supervisor

START_S = 60.0


class RemoteScorer:
    """One scoring process; the stage above it sets the time limits."""

    def __init__(self, part: Part) -> None:
        self.part = part

    async def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """One score per request. Raises WorkerDiedError if the process is gone."""
        try:
            data = await self.part.call("score", encode(list(requests)), timeout_s=float("inf"))
        except PartDiedError as error:
            raise WorkerDiedError(str(error)) from error
        assert isinstance(data, bytes)
        return decode(list[Score], data)


class Scorers:
    """All scoring processes."""

    def __init__(self, config: RunConfig, *, run_dir: Path, supervisor: Supervisor, placement: Placement) -> None:
        self._config = config
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._placement = placement
        self._parts = [self._spawn(index) for index in range(config.reward.workers)]

    async def start(self) -> list[Scorer]:
        """Start what runs in the processes."""
        return [await self._bring_up(index) for index in range(len(self._parts))]

    async def restart(self, index: int) -> Scorer:
        """End process `index` and start another in its place."""
        self._replace(index, PartDiedError(f"scorer-{index}", "died or hung over a reward function"))
        return await self._bring_up(index)

    async def _bring_up(self, index: int) -> Scorer:
        """Start it, and another in its place as often as it dies over that."""
        while True:
            try:
                return await self._start(index)
            except PartDiedError as error:
                self._replace(index, error)

    def _replace(self, index: int, error: PartDiedError) -> None:
        self._parts[index].kill()
        self._supervisor.died(error)
        self._placement.refresh()
        self._parts[index] = self._spawn(index)

    async def _start(self, index: int) -> Scorer:
        part = self._parts[index]
        spec = ScorerSpec(self._config.model_dump_json(), str(self._run_dir), index)
        pid = await part.call("start", encode(spec), timeout_s=START_S)
        assert isinstance(pid, int)
        self._supervisor.started(part.name, pid)
        return RemoteScorer(part)

    def _spawn(self, index: int) -> Part:
        place = self._placement.of_scorer(index)
        return Part(f"scorer-{index}", ScorerActor, concurrency=1, timeout_s=START_S, place=place)
