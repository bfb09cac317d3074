"""The settings of a running run: present values, changes by a user and by `staleness.control`.

The controller and the simulator own a `LiveSettings`. A change is checked as a whole config, recorded, and used by
the scheduler from the learner's next batch on, so each batch follows one bound (law 12).
"""

from collections.abc import Callable, Iterable

from laminar_py.config.changes import BOUND, PUBLISH_EVERY, changed, parse_change, unquantized, value_of
from laminar_py.config.run import RunConfig
from laminar_py.control.consumption import StepBatch
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.steering import StalenessSteering
from laminar_py.records.events import SettingChanged
from laminar_py.records.metrics import StepRow

USER, CONTROL = "user", "control"


class LiveSettings:
    """`config` has the present values; `show_line` gets a line for each change of `staleness.control`.

    `publish_every` is what the user wrote, to which control returns; None: the value of `config`. Settings that
    `held` names were changed by the user's hand under an earlier controller, and control leaves them.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        scheduler: TrajectoryScheduler,
        show_line: Callable[[str], None] = lambda line: None,
        publish_every: int | None = None,
        held: Iterable[str] = (),
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self._show_line = show_line
        control, every = config.staleness.control, publish_every or config.learner.publish_every
        self._moved = set[str]()  # settings that control may change
        self._steering = None
        if control is not None:
            self._moved = {BOUND, PUBLISH_EVERY} if control.max_publish_every else {BOUND}
            self._moved -= set(held)
            self._steering = StalenessSteering(control, publish_every=every, held=held)

    @property
    def may_change(self) -> bool:
        """Whether the learner has no batch, whose weights follow the present bound."""
        return not self._scheduler.state.num_in_step

    def change(self, *settings: str, by: str, reason: str = "") -> str:
        """Change settings other than the fleet's as one, and record them; return a line about them.

        Control leaves a setting that the user changed. Call it only if `may_change`. Raises `ConfigError` for
        changes that `config.changes` refuses, and makes none of them then.
        """
        config, before = changed(self.config, *settings), self.config
        self._scheduler_adopts(config)
        if by == USER:
            self.begin_again()
        state = self._scheduler.state
        step, why = state.recorder.machine.marks.step, f", since {reason}" if reason else ""
        words = []
        for name, value in map(parse_change, settings):
            was = value_of(before, name)
            holds = by == USER and self._hold(name)
            if value == was and not holds:
                words.append(f"{name} is {value} already")
                continue
            state.record(SettingChanged(step=step, name=name, value=value, by=by, reason=reason))
            end = ", which staleness.control leaves from now on" if holds else ""
            words.append(f"step {step}: {name} {'its default' if was is None else was} -> {value}{end}{why}")
        return "; ".join(words)

    def _hold(self, name: str) -> bool:
        """Let control leave a setting; return whether it could move the setting until now."""
        if self._steering is None or name not in self._moved:
            return False
        self._moved.remove(name)
        self._steering.hold(name)
        return True

    def unquantize(self) -> None:
        """Let engines that start from now on serve weights as published."""
        self.config = unquantized(self.config)

    def adopt(self, config: RunConfig) -> None:
        """Continue the run with a config that the user changed; control measures again."""
        self._scheduler_adopts(config)
        self.begin_again()

    def begin_again(self) -> None:
        """Let control forget its measurements, e.g. after the learner went back to a checkpoint."""
        bound = self._scheduler.state.settings.admission.max_staleness
        if self._steering is not None and bound is not None:
            self._steering.begin_again(bound)

    def _scheduler_adopts(self, config: RunConfig) -> None:
        self.config = config
        self._scheduler.adopt(config)

    def stepped(self, row: StepRow, batch: StepBatch) -> str:
        """Make the changes of `staleness.control` after a committed step; return its alarm, "" without one."""
        admission = self._scheduler.state.settings.admission
        if self._steering is None or admission.max_staleness is None:
            return ""
        changes, alarm = self._steering.observe(
            row,
            spare=batch.spare // admission.batch,
            waited_s=batch.waited_s,
            bound=admission.max_staleness,
            publish_every=admission.publish_every,
        )
        for one in changes:
            self._show_line(self.change(f"{one.name}={one.value}", by=CONTROL, reason=one.reason))
        return alarm
