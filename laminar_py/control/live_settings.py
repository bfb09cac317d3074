"""The settings of a running run: present values, changes by a user and by `staleness.control`.

The controller and the simulator own a `LiveSettings`. A change is checked as a whole config, recorded, and used by
the scheduler from the learner's next batch on, so each batch follows one bound (law 12).
"""

from collections.abc import Callable

from laminar_py.config.changes import changed, parse_change, value_of
from laminar_py.config.run import RunConfig
from laminar_py.control.consumption import StepBatch
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.steering import StalenessSteering
from laminar_py.records.events import SettingChanged
from laminar_py.records.metrics import StepRow

USER, CONTROL = "user", "control"


class LiveSettings:
    """`config` has the present values; `show_line` gets a line for each change of `staleness.control`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        scheduler: TrajectoryScheduler,
        show_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self._show_line = show_line
        control, every = config.staleness.control, config.learner.publish_every
        self._steering = None if control is None else StalenessSteering(control, publish_every=every)

    @property
    def may_change(self) -> bool:
        """Whether the learner has no batch, whose weights follow the present bound."""
        return not self._scheduler.state.num_in_step

    def change(self, setting: str, *, by: str, reason: str = "") -> str:
        """Change a setting other than the fleet's, and record it; return a line about it.

        Call it only if `may_change`. Raises `ConfigError` for a change that `config.changes` refuses.
        """
        name, value = parse_change(setting)
        config, before = changed(self.config, setting), value_of(self.config, name)
        if value == before:
            return f"{name} is {value} already"
        self.adopt(config)
        state = self._scheduler.state
        step = state.recorder.machine.marks.step
        state.record(SettingChanged(step=step, name=name, value=value, by=by, reason=reason))
        was = "its default" if before is None else before
        return f"step {step}: {name} {was} -> {value}" + (f", since {reason}" if reason else "")

    def adopt(self, config: RunConfig) -> None:
        """Continue the run with a changed config."""
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
            bound=admission.max_staleness,
            publish_every=admission.publish_every,
        )
        for one in changes:
            self._show_line(self.change(f"{one.name}={one.value}", by=CONTROL, reason=one.reason))
        return alarm
