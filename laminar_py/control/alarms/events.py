"""All checks of events, for a running run and for the audit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

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
from laminar_py.records.events import AnyEvent
from laminar_py.records.proofs import Alarm
from laminar_py.records.trajectory import Prompt


class EventCheck(Protocol):
    """A check that reads events of the types `takes`."""

    takes: ClassVar[tuple[type, ...]]

    def observe(self, event: AnyEvent, row: LiveTrajectory | None) -> Iterable[Alarm]:
        """Take an event in the order of the log, with the row that it changed."""
        ...


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
            prompt = prompt_of(row)
            return "" if prompt is None else prompt.task

        self.batches, self.rewards = BatchCheck(), RewardsCheck(task_of)
        checks: tuple[EventCheck, ...] = (
            WeightsCheck(),
            self.batches,
            AdvantageCheck(None if config is None else config.algorithm),
            StalenessCheck(None if config is None else config.staleness),
            LengthCheck(has_environment=config is None or config.environment is not None),
            self.rewards,
            CoverageCheck(task_of),
            EvaluationCheck(prompt_of, problems or {}),
        )

        self._by_type: dict[type, list[Callable[[AnyEvent, LiveTrajectory | None], Iterable[Alarm]]]] = {}
        for check in checks:
            for kind in check.takes:
                self._by_type.setdefault(kind, []).append(check.observe)

    def observe(self, event: AnyEvent, row: LiveTrajectory | None) -> Sequence[Alarm]:
        """Take an event in the order of the log, with the row that it changed; return its alarms."""
        if (observers := self._by_type.get(type(event))) is None:
            return ()
        found: list[Alarm] = []
        for observe in observers:
            found += observe(event, row)
        return found
