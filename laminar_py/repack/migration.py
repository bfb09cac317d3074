"""Rounds of repacking: look at the replicas, plan, and carry the plan out. Owned by the controller.

A round, for each version that several replicas serve: SURVEY (each says what it has at this moment) -> PLAN (pure)
-> PROMISE (destinations keep their version for what is to come) -> GIVE UP (sources end what still is as it was
planned, and report it) -> HANDED OVER (the flow assigns each to its destination as its report comes in). Whatever
happens to a replica in between, `control.flow` knows where each trajectory is, and the round ends.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from laminar_py.config import RepackPlanner
from laminar_py.control.flow import Flow
from laminar_py.events import Repacked
from laminar_py.interfaces import Clock
from laminar_py.repack.planner import Move, PaperPlanner, Planner, PredictivePlanner
from laminar_py.repack.signals import EngineSpeed, Numbers, RampDown, RemainingTokens
from laminar_py.types import FinishReason, Held, Survey, Trajectory


class Fleet(Protocol):
    """The replicas, as a round needs them."""

    async def survey(self, replica: int) -> Survey | None:
        """What it has at this moment; None if it is dying."""
        ...

    async def expect(self, replica: int, version: int, count: int) -> bool:
        """Whether it promises to keep `version` until so many trajectories have come."""
        ...

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """It ends these and reports what they have."""
        ...


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """As in `config.RepackConfig`; `max_tokens` is the cap on responses."""

    planner: RepackPlanner
    interval_s: float
    max_stall_s: float
    max_tokens: int


class Migration:
    """Rounds every `interval_s`, and whenever `published` returns: there is a new version."""

    def __init__(
        self,
        settings: MigrationSettings,
        *,
        flow: Flow,
        fleet: Fleet,
        published: Callable[[], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._flow = flow
        self._fleet = fleet
        self._clock = clock
        self._published = published
        self._remaining = RemainingTokens(settings.max_tokens)
        self._previous: dict[int, int] = {}  # KV tokens of each replica at the last round

    def finished(self, trajectory: Trajectory) -> None:
        """A response ended."""
        capped = trajectory.finish_reason is FinishReason.LENGTH
        self._remaining.finished(len(trajectory.response_ids), capped=capped)

    async def run(self, speed: EngineSpeed) -> None:
        """Rounds until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.interval_s):
                    await self._published()
            await self._round(speed)

    async def _round(self, speed: EngineSpeed) -> None:
        groups = [group for group in self._flow.dispatcher.by_version().values() if len(group) > 1]
        surveys = await asyncio.gather(*(self._fleet.survey(replica) for group in groups for replica in group))
        by_version: dict[int, list[Survey]] = {}
        for survey in surveys:
            if survey is not None:
                by_version.setdefault(survey.version, []).append(survey)
        self._remaining.look(held.length for survey in surveys if survey for held in survey.running)
        planner = self._planner(speed)
        await asyncio.gather(*(self._carry_out(version, planner.plan(g)) for version, g in by_version.items()))
        self._previous = {survey.replica: survey.kv_used for survey in surveys if survey}

    def _planner(self, speed: EngineSpeed) -> Planner:
        if self._settings.planner is RepackPlanner.PAPER:
            return PaperPlanner(RampDown(self._previous, speed.roofline_batch))
        return PredictivePlanner(speed, self._to_come, max_stall_s=self._settings.max_stall_s)

    def _to_come(self, held: Sequence[Held]) -> Numbers:
        """[n] expected tokens of these, from the lengths of this run and of each one's group."""
        expected = self._remaining.expected(np.array([item.length for item in held], np.float64))
        for place, item in enumerate(held):
            siblings = self._flow.book.finished_siblings(item.trajectory_id)
            if siblings:
                expected[place] = self._remaining.of_group(item.length, float(expected[place]), siblings)
        return expected

    async def _carry_out(self, version: int, planned: Sequence[Move]) -> None:
        if not planned:
            return
        began = self._clock.now()
        coming = Counter(move.destination for move in planned)
        promises = await asyncio.gather(
            *(self._fleet.expect(replica, version, count) for replica, count in coming.items())
        )
        willing = {replica for replica, promised in zip(coming, promises, strict=True) if promised}
        moves = [move for move in planned if move.destination in willing]
        asked = self._flow.move(version, moves)
        for source, trajectory_ids in asked.items():
            self._fleet.give_up(source, trajectory_ids)
        await self._flow.moves.settled()
        gone = {trajectory_id for trajectory_ids in asked.values() for trajectory_id in trajectory_ids}
        moves = [move for move in moves if move.trajectory_id in gone]
        begun = [move for move in moves if move.prefill]
        prefill = Counter[int]()
        for move in begun:
            prefill[move.destination] += move.prefill
        event = Repacked(
            version,
            len(begun),
            len(moves) - len(begun),
            tuple(sorted(asked)),
            max(prefill.values(), default=0),
            self._clock.now() - began,
        )
        self._flow.book.record(event)
