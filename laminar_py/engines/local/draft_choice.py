"""When drafts pay: rates of steps with drafts and without, and the time of a step by its tokens; for `drafts`."""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MEMORY = 32  # steps over which times and rates are averaged
FIRST = 4  # steps before the first trial
FASTER = 64  # steps of the faster way until the next trial, at least
TRIAL = 5  # steps of the slower way; the first one is cold and does not count
MOST_MOVE = 1.25  # factor by which one trial moves a speed-up
TRIAL_SHARE = 0.005  # of the time: most that trials cost

Numbers = npt.NDArray[np.float64]


@dataclass(slots=True)
class Rate:
    """Tokens and seconds over steps, of which older ones weigh less."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a step."""
        kept = 1 - 1 / MEMORY
        self.tokens = kept * self.tokens + tokens
        self.seconds = kept * self.seconds + seconds
        self.steps = kept * self.steps + 1


@dataclass(slots=True, kw_only=True)
class DraftChoice:
    """Choice between drafts and none in steps of one kind: the way that was faster in trials of the other.

    A trial is compared with the steps just before it, since rates change as responses grow. It is short and may
    mislead, so it moves the speed-up half of the way, at most by a quarter, and where it speaks for the
    other way the next comes soon. The slower a way was, the longer it is not tried: trials cost `TRIAL_SHARE` of
    the time, and the wait at most doubles.
    """

    used: int = 0  # steps so far
    trials: int = 0
    speedup: float = 1.0  # rate with drafts over the rate without; the last trial counts half
    drafts: bool = False  # the faster way
    steps: int = 0  # since the last trial
    wait: int = FIRST  # steps until the next
    rate: Rate = field(default_factory=Rate)  # of the faster way
    tried: Rate = field(default_factory=Rate)  # of the other, in the trial under way

    def advance(self) -> bool:
        """Begin a step, and return True if it should draft."""
        if self.steps == self.wait + TRIAL:
            self._judge()
        self.used += 1
        self.steps += 1
        return self.drafts is not (self.steps > self.wait)

    def add(self, tokens: float, seconds: float) -> None:
        """Take the tokens and seconds of the step that `advance` began."""
        if self.steps <= self.wait:
            self.rate.add(tokens, seconds)
        elif self.steps > self.wait + 1:
            self.tried.add(tokens, seconds)

    def _judge(self) -> None:
        """Compare a trial with the steps before it, and plan the next."""
        rate, tried, self.steps, self.tried = self.rate, self.tried, 0, Rate()
        gain = tried.tokens * rate.seconds / max(1e-9, rate.tokens * tried.seconds)
        if not gain:  # the first steps of an engine do not count
            return
        found = 1 / gain if self.drafts else gain
        moved = math.sqrt(found / self.speedup)
        self.speedup = self.speedup * min(max(moved, 1 / MOST_MOVE), MOST_MOVE) if self.trials else found
        self.trials += 1
        if self.drafts is not (self.speedup > 1):
            self.drafts, self.rate = not self.drafts, Rate()
        if self.drafts is not (found > 1) or not self.rate.steps:
            self.wait = 2 * FIRST
            return
        lost_s = TRIAL / tried.steps * (tried.seconds - tried.tokens * rate.seconds / rate.tokens)
        wanted = lost_s * rate.steps / rate.seconds / TRIAL_SHARE  # steps
        self.wait = round(max(FASTER, min(2 * self.wait, wanted)))


class StepTimes:
    """Time of a step as a line over the number of tokens that it feeds, by the last steps."""

    def __init__(self) -> None:
        # weight, tokens, seconds, tokens squared, tokens times seconds
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        kept = 1 - 1 / MEMORY
        weight, total, time, squares, products = self._sums
        self._sums = (
            kept * weight + 1,
            kept * total + tokens,
            kept * time + seconds,
            kept * squares + tokens * tokens,
            kept * products + tokens * seconds,
        )

    def at(self, tokens: Numbers) -> Numbers | None:
        """Return seconds [n] of steps by the tokens [n] that they feed; None while all steps had one size."""
        weight, total, seconds, squares, products = self._sums
        spread = weight * squares - total * total
        if spread <= 1e-3 * weight * weight:
            return None
        slope = max(0.0, (weight * products - total * seconds) / spread)
        mean = seconds / weight
        line: Numbers = mean + slope * (tokens - total / weight)
        return line.clip(0.1 * mean)
