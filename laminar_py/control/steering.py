"""The policy of `staleness.control`: when the bound, and the steps between two versions, change. Pure.

`control.live_settings` owns it and applies its changes. It weighs two costs over a window of steps. A tight bound
costs time, since the learner waits for groups that may not begin yet. A wide bound costs signal: the effective
sample size of old data falls. The number of groups in flight follows the bound (`Admission.limit`). At the end of
a window the first of these rules that applies makes one change. The first two change the steps between two
versions by 1, within `max_publish_every` and the bound, and the next three change the bound by 1:

1. The learner waits for publishes for a tenth of the time: publish more rarely. A rise stays on trial.
2. Publishes delay it no longer: publish more often, down to the number that the user wrote.
3. The oldest data is less effective than `least_effective`: lower.
4. After the last rise the learner does not work clearly more of the time: undo the rise. A gain that may be chance
   is looked at for a second window. Until `RETRY` windows later, rise again only if the learner waits much more
   than then; this threshold falls with each window.
5. The learner waits for a tenth of the time, and little is lost to old data: rise.
6. Whole further batches lay ready at every step: lower, by as many, which makes data fresher and costs nothing.

A setting that the user changed in the running run is held: no rule changes it, nor does a collapse.
A collapse lowers the bound to its least at once: the reward falls clearly while old data has lost its signal.
Means of the reward over a few steps are too noisy to judge a single change by, so only a collapse reads them.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from laminar_py.config.changes import BOUND, PUBLISH_EVERY
from laminar_py.config.steering import StalenessControl
from laminar_py.records.metrics import StepRow

MUCH, LITTLE = 0.1, 0.02  # of the time: the learner waits for batches, or for publishes
PAYS = 0.03  # of the learner's share of work: a rise pays if this share grows by more, and not by chance
FEW = 0.05  # of a window's tokens: staler ones do not count
LOST_SIGNAL = 0.3  # effectiveness of old data in a collapse
FALL, SIGMAS = 0.25, 3.0  # of the best reward, and standard errors, by which the reward falls in a collapse
RETRY = 20  # windows after which the same share of waits may lead to the rise that was undone
RESTED = 10  # windows without a rise after a collapse, and in which old data may have lost its signal before one


@dataclass(frozen=True, slots=True)
class Change:
    """A new value of a setting, e.g. `Change("staleness.max_staleness", 5, "the learner waits ...")`."""

    name: str
    value: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Measurements of some steps, e.g. `Window(waits=0.2, noise=0.04, stalled=0.01, effective=0.9, spare=0)`."""

    waits: float  # share of the time in which the learner waited for its next batch
    noise: float  # standard error of `waits`, as far as steps differ
    stalled: float  # share of the time in which it waited for publishes
    effective: float  # effective sample size of the oldest data over the youngest's, in [0, 1]
    spare: int  # batches that lay ready at every step when the learner took its own


@dataclass(frozen=True, slots=True)
class Measured:
    """A step of a window."""

    row: StepRow
    spare: int  # batches that it left ready
    waited_s: float  # for its batch alone

    @property
    def whole_s(self) -> float:
        """Seconds of the step."""
        return self.waited_s + self.row.publish_stall_s + self.row.learner_s


class StalenessSteering:
    """Decides after each step; `publish_every` is the least number of steps between two versions.

    Settings that `held` names stay.
    """

    def __init__(self, control: StalenessControl, *, publish_every: int, held: Iterable[str] = ()) -> None:
        self._control = control
        self._least_every = publish_every
        self._held = set(held)
        self._skip: int | None = None  # steps that do not count, since their data is from before a change
        self._rows: list[Measured] = []  # of the present window
        self._before_rise: Window | None = None  # while a rise is on trial
        self._rise_at = MUCH  # least share of waits for a rise; above 1: none for now
        self._fresh = 1.0  # effective sample size of the youngest data, when last known
        self._rest = 0  # windows without a rise
        self._collapse = CollapseWatch(control.window)

    def hold(self, name: str) -> None:
        """Change a setting no longer, since the user has changed it by hand."""
        self._held.add(name)

    def begin_again(self, bound: int) -> None:
        """Forget the measurements: another fleet, setting or learner makes the next steps."""
        self._rise_at, self._before_rise = MUCH, None
        self._begin_window(1 + bound)

    def observe(
        self, row: StepRow, *, spare: int, waited_s: float, bound: int, publish_every: int
    ) -> tuple[Sequence[Change], str]:
        """Return the changes after a step, and the words of an alarm, "" without one.

        `spare` is the number of whole batches that the step left ready, and `waited_s` the seconds for which the
        learner waited for its own batch alone. `bound` and `publish_every` are the present values, also where a
        user changed them.
        """
        least = max(self._control.min, publish_every - 1)
        effective = self._oldest([row])
        if alarm := self._collapse.observe(row, effective):
            self._rest, self._before_rise = RESTED, None
            self._begin_window(bound)
            lowers = bound > least and BOUND not in self._held
            return [Change(BOUND, least, "the reward collapses on old data")] if lowers else [], alarm
        if self._skip is None:
            self._skip = 1 + bound  # the first batches wait for the first responses
        if self._skip:
            self._skip -= 1
            return (), ""
        self._rows.append(Measured(row, spare, waited_s))
        if len(self._rows) % self._control.window:
            return (), ""
        self._rise_at = max(MUCH, self._rise_at - MUCH / RETRY)
        window, is_first = self._measure(), len(self._rows) == self._control.window
        every = self._decide_every(window, bound=bound, publish_every=publish_every)
        if every is None and is_first and bound > least and self._is_unclear(window):
            return (), ""
        changes = [every] if every is not None else list(self._decide_bound(window, bound=bound, least=least))
        self._rest = max(0, self._rest - 1)
        self._begin_window(max([bound, *(one.value for one in changes)]) if changes else 0)
        return changes, ""

    def _begin_window(self, skip: int) -> None:
        self._skip = skip
        self._rows.clear()

    def _measure(self) -> Window:
        """Return the measurements of the present window."""
        rows = [one.row for one in self._rows]
        whole_s = max(sum(one.whole_s for one in self._rows), 1e-9)
        waits = sum(one.waited_s for one in self._rows) / whole_s
        squares, count = sum((one.waited_s - waits * one.whole_s) ** 2 for one in self._rows), len(rows)
        return Window(
            waits=waits,
            noise=math.sqrt(squares * count / (count - 1)) / whole_s,
            stalled=sum(row.publish_stall_s for row in rows) / whole_s,
            effective=self._oldest(rows),
            spare=min(one.spare for one in self._rows),
        )

    def _oldest(self, rows: Sequence[StepRow]) -> float:
        """Return the effective sample size of the oldest data over the youngest's; 1 for fresh data alone.

        Data of one age that is not fresh is compared with the youngest data that was last seen beside older data.
        """
        by_age = effectiveness(rows)
        oldest, youngest = max(by_age, default=0), min(by_age, default=0)
        if by_age and (not youngest or youngest < oldest):
            self._fresh = by_age[youngest]
        return min(1.0, by_age[oldest] / self._fresh) if oldest and self._fresh > 0 else 1.0

    def _is_unclear(self, window: Window) -> bool:
        """Whether a rise is on trial that would stay, if its gain were no chance."""
        before, effective = self._before_rise, window.effective >= self._control.least_effective
        return before is not None and effective and _pays(before, window) and not _is_clear(before, window)

    def _decide_every(self, window: Window, *, bound: int, publish_every: int) -> Change | None:
        """Return the change of the steps between two versions, None where they stay."""
        most = 0 if PUBLISH_EVERY in self._held else self._control.max_publish_every or 0
        if window.stalled >= MUCH and publish_every < most and publish_every <= bound:
            why = f"the learner waits for publishes {window.stalled:.0%} of the time"
            return Change(PUBLISH_EVERY, publish_every + 1, why)
        if window.stalled <= LITTLE and self._least_every < publish_every <= most:
            return Change(PUBLISH_EVERY, publish_every - 1, "publishes delay the learner no longer")
        return None

    def _decide_bound(self, window: Window, *, bound: int, least: int) -> Iterator[Change]:
        """Yield at most one change of the bound, which ends the trial of a rise."""
        if BOUND in self._held:
            return
        before, self._before_rise = self._before_rise, None
        if bound > least and window.effective < self._control.least_effective:
            why = f"the oldest data has {window.effective:.0%} of the effective sample size of the youngest"
            yield Change(BOUND, bound - 1, why)
        elif bound > least and before is not None and not (_pays(before, window) and _is_clear(before, window)):
            self._rise_at = max(window.waits, before.waits) + MUCH
            why = (
                f"the learner waits {window.waits:.0%} of the time, and {before.waits:.0%} before the bound rose;"
                f" a difference of {math.hypot(before.noise, window.noise):.0%} may be chance"
            )
            yield Change(BOUND, bound - 1, why)
        elif bound < self._control.max and self._may_rise(window):
            self._before_rise = window
            why = (
                f"the learner waits {window.waits:.0%} of the time, and old data loses {1 - window.effective:.0%}"
            )
            yield Change(BOUND, bound + 1, why)
        elif bound > least and window.waits <= LITTLE and window.spare:
            why = "further batches always lie ready, so fresher data costs nothing"
            yield Change(BOUND, max(least, bound - window.spare), why)

    def _may_rise(self, window: Window) -> bool:
        """Whether the learner waits enough, and old data loses little, also less than the waits."""
        lost = 1 - window.effective
        waits = not self._rest and window.waits >= self._rise_at
        return waits and lost <= min(window.waits, (1 - self._control.least_effective) / 2)


def _pays(before: Window, after: Window) -> bool:
    """Whether the learner works more of the time after a rise, by over `PAYS`."""
    return before.waits - after.waits > PAYS * (1 - before.waits)


def _is_clear(before: Window, after: Window) -> bool:
    """Whether the waits after a rise are shorter by more than the standard error of the difference."""
    return before.waits - after.waits > math.hypot(before.noise, after.noise)


def effectiveness(rows: Iterable[StepRow]) -> dict[int, float]:
    """Return the effective sample size over the number of tokens by the least staleness of a bucket, e.g. {3:
    0.8}.

    Buckets with few tokens are left out. Figures that are not finite count as 0.
    """
    tokens, sums = dict[int, int](), dict[int, float]()
    for row in rows:
        for name, figures in row.by_staleness.items():
            age, share = int(name.rstrip("+").partition("-")[0]), figures.effective_share
            tokens[age] = tokens.get(age, 0) + figures.num_tokens
            sums[age] = sums.get(age, 0.0) + figures.num_tokens * (share if math.isfinite(share) else 0.0)
    enough = max(1.0, FEW * sum(tokens.values()))
    return {age: sums[age] / tokens[age] for age in sums if tokens[age] >= enough}


class CollapseWatch:
    """Finds a collapse on stale data: the reward falls far below its best, and old data has lost its signal."""

    def __init__(self, window: int) -> None:
        self._rewards: deque[float] = deque(maxlen=window)
        self._effective: deque[float] = deque(maxlen=RESTED * window)
        self._best: tuple[float, float] | None = None  # mean reward of a window, and the variance of this mean
        self._worst = math.inf  # mean

    def observe(self, row: StepRow, effective: float) -> str:
        """Return the words of an alarm after a step with this effectiveness of its oldest data, "" without one."""
        self._effective.append(effective)
        if not math.isnan(row.reward):
            self._rewards.append(row.reward)
        count = len(self._rewards)
        if count < (self._rewards.maxlen or 0):
            return ""
        mean = sum(self._rewards) / count
        variance = sum((reward - mean) ** 2 for reward in self._rewards) / (count - 1) / count
        if self._best is None or mean > self._best[0]:
            self._best = mean, variance
        self._worst = min(self._worst, mean)
        best, of_best = self._best
        noise, scale = math.sqrt(variance + of_best), max(abs(best), best - self._worst)
        least = min(self._effective)
        if best - mean <= max(SIGMAS * noise, FALL * scale) or least >= LOST_SIGNAL:
            return ""
        self._best, self._worst = None, math.inf  # a further fall is another collapse
        self._rewards.clear()
        self._effective.clear()
        return (
            f"step {row.step}: the mean reward fell from {best:.3g} to {mean:.3g}, and the oldest data had"
            f" {least:.0%} of the effective sample size of the youngest; the learning rate is too high for data"
            " this old: lower learner.lr or staleness.max_staleness, and resume from a checkpoint before the fall"
        )
