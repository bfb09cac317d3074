"""Repack rounds: survey the replicas, plan moves, and carry the plan out. The controller owns `Migration`.

A round, for each version that several replicas serve:

    CHOOSE       of a large fleet: the emptiest, the fullest, and others in turn
    SURVEY       each chosen replica reports its trajectories and its KV use
    PLAN         a planner, which is pure, returns moves
    PROMISE      destinations keep their version until the moved trajectories arrive
    GIVE UP      sources abort the planned trajectories and report their tokens
    HANDED OVER  the scheduler assigns each trajectory to its destination when the source's report arrives

`control.moves` knows where each trajectory is, so a replica may crash at any point. The next round starts after
one interval even if a slow source still holds trajectories. A round is recorded when its moves have ended.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

from laminar_py.config.rollout import DEFAULT_PLANNER, PLANNERS
from laminar_py.config.run import RunConfig
from laminar_py.control.moves import Round
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.views import ReplicaView
from laminar_py.records.events import Repacked
from laminar_py.records.host import Clock
from laminar_py.records.replica import Move, Survey
from laminar_py.records.trajectory import FinishReason, TrajectoryRef
from laminar_py.repack.planner import Planner, PlanningContext
from laminar_py.repack.signals import EngineSpeed, GroupForecast, RemainingTokens

MARGIN = 1.6  # factor on the tokens that a response is expected to add between survey and hand-over
FORGET = 0.95  # factor per round on this expectation, if the responses of the round added fewer
ASKED_AT_ONCE = 32  # replicas whose surveys are requested before the event loop gets to other work
MOST_SURVEYED = 256  # replicas in a round, so that its cost stays bounded in a larger fleet


class ReplicaFleet(Protocol):
    """Calls to replicas that a round makes."""

    async def survey(self, replica: int) -> Survey | None:
        """Return a replica's trajectories and KV use; None if it crashed or does not answer."""
        ...

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """Ask a replica to keep `version` until these trajectories arrive; return whether it promised in time."""
        ...

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """Send a replica the command to abort these trajectories and report their tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSettings:
    """Settings of `config.rollout.RepackConfig`, with the cap on response tokens and `environment.hold_s`."""

    planner: str  # a name in `config.rollout.PLANNERS`
    interval_s: float
    max_stall_s: float
    max_new_tokens: int
    hold_s: float = math.inf

    @staticmethod
    def from_config(config: RunConfig) -> "MigrationSettings":
        """Return the settings from a run's config."""
        return MigrationSettings(
            planner=config.repack.planner or DEFAULT_PLANNER,
            interval_s=config.repack.interval_s,
            max_stall_s=config.repack.max_stall_s,
            max_new_tokens=config.rollout.sampling.max_new_tokens,
            hold_s=math.inf if config.environment is None else config.environment.hold_s,
        )


class Migration:
    """Runs a repack round every `interval_s`, and whenever `published(version)` returns a newer version."""

    def __init__(
        self,
        settings: MigrationSettings,
        *,
        scheduler: TrajectoryScheduler,
        fleet: ReplicaFleet,
        published: Callable[[int], Awaitable[int]],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._fleet = fleet
        self._clock = clock
        self._published = published
        self._remaining = RemainingTokens(settings.max_new_tokens)
        self._newest = -1  # published version at the start of the last round
        self._growth: float | None = None  # expected tokens that a response adds between survey and hand-over
        self._previous_kv: dict[int, int] = {}  # KV tokens in use at each replica's last survey
        self._turn = 0  # number of the next round

    def finished(self, trajectory: TrajectoryRef) -> None:
        """Note the length of a finished response, for the forecast."""
        capped = trajectory.finish_reason is FinishReason.LENGTH
        self._remaining.finished(trajectory.length, capped=capped)

    async def run(self, speed: EngineSpeed) -> None:
        """Run rounds until cancelled; `speed` is the speed of every replica's engine."""
        planner = PLANNERS.get(self._settings.planner)
        async with asyncio.TaskGroup() as recording:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.interval_s):
                        self._newest = await self._published(self._newest)
                await self._round(speed, planner, recording)

    async def _round(
        self, speed: EngineSpeed, kind: Callable[[PlanningContext], Planner], recording: asyncio.TaskGroup
    ) -> None:
        """Survey some replicas, plan moves within each version by a `kind` of planner, and carry the moves out."""
        chosen = choose(self._scheduler.views.by_version(), most=MOST_SURVEYED, turn=self._turn)
        self._turn += 1
        surveys = await self._surveys(chosen)
        surveys_by_version: dict[int, list[Survey]] = {}
        for survey in surveys:
            surveys_by_version.setdefault(survey.version, []).append(survey)
        context = self._context(speed, surveys)
        planned: dict[int, list[Move]] = {}
        with PLANNERS.naming_package(self._settings.planner):
            planner = kind(context)
            for version, same_version in surveys_by_version.items():
                planned[version] = planner.plan(same_version)
                await asyncio.sleep(0)
        await asyncio.gather(*(self.carry_out(version, moves, recording) for version, moves in planned.items()))
        self._previous_kv |= {survey.replica: survey.kv_used for survey in surveys}

    async def _surveys(self, replicas: Sequence[int]) -> list[Survey]:
        """Survey all `replicas` in parallel, and return the surveys of the replicas that answered."""
        async with asyncio.TaskGroup() as asking:
            surveys: list[asyncio.Task[Survey | None]] = []
            for first in range(0, len(replicas), ASKED_AT_ONCE):
                batch = replicas[first : first + ASKED_AT_ONCE]
                surveys += [asking.create_task(self._fleet.survey(replica), name="survey") for replica in batch]
                await asyncio.sleep(0)
        return [survey for task in surveys if (survey := task.result()) is not None]

    def _context(self, speed: EngineSpeed, surveys: Sequence[Survey]) -> PlanningContext:
        """Update the forecast by the response lengths in `surveys`, and return the state that a planner uses."""
        self._remaining.update([summary.length for survey in surveys for summary in survey.running])
        if self._growth is None:  # before the first move: the tokens that a response adds in one interval
            self._growth = self._settings.interval_s * speed.rate(sequences=1, kv_tokens=0.0)
        return PlanningContext(
            speed=speed,
            forecast=GroupForecast(self._remaining, self._scheduler.state.finished_beside),
            max_stall_s=self._settings.max_stall_s,
            hold_s=self._settings.hold_s,
            growth=1 + int(MARGIN * self._growth),
            has_demand=self._scheduler.router.num_admitted > 0,
            previous_kv=self._previous_kv,
        )

    async def carry_out(self, version: int, planned: Sequence[Move], recording: asyncio.TaskGroup) -> None:
        """Carry out the planned moves of a version, and wait for their end, at most one interval.

        Leaves out a move whose trajectory is already in a move, or whose destination does not promise to keep the
        version. A task in `recording` records the round after its last move.
        """
        moves = self._scheduler.moves
        planned = [move for move in planned if moves.destination(move.trajectory_id) is None]
        if not planned:
            return
        began = self._clock.now()
        coming: dict[int, list[str]] = {}
        for move in planned:
            coming.setdefault(move.destination, []).append(move.trajectory_id)
        promises = await asyncio.gather(
            *(self._fleet.expect(replica, version, names) for replica, names in coming.items())
        )
        willing = {replica for replica, promised in zip(coming, promises, strict=True) if promised}
        moving = self._scheduler.dispatcher.move(
            version, [move for move in planned if move.destination in willing]
        )
        for source, trajectory_ids in moving.asked.items():
            self._fleet.give_up(source, trajectory_ids)
        recorded = recording.create_task(self._record(moving, began), name="record-repack")
        await asyncio.wait([recorded], timeout=self._settings.interval_s)

    async def _record(self, moving: Round, began: float) -> None:
        """Wait for the end of a round that began at `began`; record `Repacked` if any trajectory arrived."""
        await moving.done.wait()
        if moving.growth:
            self._growth = max(mean(moving.growth), FORGET * (self._growth or 0.0))
        if moving.num_running + moving.num_waiting:
            event = Repacked(
                version=moving.version,
                num_running=moving.num_running,
                num_waiting=moving.num_waiting,
                sources=tuple(sorted(moving.asked)),
                prefill=max(moving.prefill.values(), default=0),
                elapsed_s=self._clock.now() - began,
            )
            self._scheduler.state.record(event)


def choose(by_version: Mapping[int, Sequence[ReplicaView]], *, most: int, turn: int) -> list[int]:
    """Choose about `most` replicas to survey in round number `turn`, from each version in proportion.

    A version that only one replica serves is left out. Of each other version a quarter of the choice has the least
    work, to be emptied first. A quarter has the most work, some of it waiting. The rest of the replicas, which may
    have room, take turns from round to round.
    """
    groups = [group for group in by_version.values() if len(group) > 1]
    total = sum(map(len, groups))
    if total <= most:
        return [view.index for group in groups for view in group]
    chosen: list[int] = []
    for group in groups:
        ordered = sorted(group, key=lambda view: len(view.in_flight))
        quota = most * len(group) // total
        end = max(1, quota // 4)
        between = sorted(view.index for view in ordered[end:-end])
        first = turn * (quota - 2 * end) % max(1, len(between))
        chosen += [view.index for view in (*ordered[:end], *ordered[-end:])]
        chosen += [*between[first:], *between[:first]][: max(0, quota - 2 * end)]
    return chosen
