"""All checks of events, for a running run and for the audit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from laminar_py.config.run import RunConfig
from laminar_py.control.alarms.data import (
    AdvantageCheck,
    BatchCheck,
    CoverageCheck,
    EvaluationCheck,
    LengthCheck,
    RewardsCheck,
    StalenessCheck,
)
from laminar_py.control.alarms.weights import WeightsCheck
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records import events as e
from laminar_py.records.proofs import Alarm
from laminar_py.records.trajectory import Kind, Prompt

# type of event -> what observes it, with the row that it changed
Routes: TypeAlias = Mapping[type, Sequence[Callable[[Any, Any], Iterable[Alarm]]]]


class EventChecks:
    """All checks of events; `prompt_of` gives a trajectory's prompt, None if it is unknown.

    Without the run's `config`, and the number of `problems` of each evaluation set, some checks are less strict.
    """

    def __init__(
        self,
        prompt_of: Callable[[LiveTrajectory], Prompt | None],
        *,
        config: RunConfig | None = None,
        problems: Mapping[str, int] | None = None,
    ) -> None:
        def task_of(row: LiveTrajectory) -> str:
            return "" if (prompt := prompt_of(row)) is None else prompt.task

        self.batches, self.rewards, weights = BatchCheck(), RewardsCheck(task_of), WeightsCheck()
        advantages = AdvantageCheck(None if config is None else config.algorithm)
        staleness = StalenessCheck(None if config is None else config.staleness)
        lengths = LengthCheck(has_environment=config is None or config.environment is not None)
        coverage, evaluation = CoverageCheck(task_of), EvaluationCheck(prompt_of, problems or {})
        of_lengths: Routes = {e.Cut: (lengths.was_cut,), e.Finished: (lengths.finished,)}
        self._training: Routes = {
            **of_lengths,
            e.Issued: (self.batches.opened,),
            e.Undone: (self.batches.opened,),
            e.Assigned: (evaluation.trained,),
            e.Scored: (self.rewards.scored,),
            e.Ready: (advantages.ready,),
            e.Consumed: (self.batches.consumed, advantages.ended, staleness.consumed, coverage.consumed),
            e.Dropped: (self.batches.dropped, advantages.ended, coverage.dropped),
        }
        self._evaluating: Routes = {
            **of_lengths,
            e.Assigned: (evaluation.assigned,),
            e.Consumed: (evaluation.consumed,),
            e.Dropped: (evaluation.dropped,),
        }
        self._of_run: Routes = {
            e.Evaluated: (evaluation.evaluated,),
            e.Stepped: (weights.stepped, self.batches.stepped),
            e.RolledBack: (weights.rolled_back,),
            e.SettingChanged: (staleness.changed,),
            e.VersionPublished: (weights.published,),
            e.VersionLoaded: (weights.loaded,),
        }

    def observe(self, event: e.AnyEvent, row: LiveTrajectory | None) -> Sequence[Alarm]:
        """Take an event in the order of the log, with the row that it changed; return its alarms."""
        routes = self._of_run if row is None else self._training if row.kind is Kind.TRAIN else self._evaluating
        if (observers := routes.get(type(event))) is None:
            return ()
        found: list[Alarm] = []
        for observe in observers:
            if alarms := observe(event, row):
                found += alarms
        return found
