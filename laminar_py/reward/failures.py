"""Failed scores of a run: how many there are, which the user is told of, and when there are so many that it ends.

Pure; `orchestrator.scoring` hands in every score and acts on the answers. Each failure is on record too (law 6).
"""

from collections import Counter, deque

from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import DropReason

FEWEST = 32  # responses from which anything is concluded
NEARLY_ALL = 0.9  # share of a step's trajectories
SOME = 0.1  # share that fails of wrong answers alone, beside which nothing teaches
BARREN_STEPS = 3


class ScoreFailures:
    """Failed scores of the reward `function`; `step` trajectories make a learner step.

    One failure of each task and reason is told: a reward that fails now and then does not fill the terminal.
    """

    def __init__(self, function: str, *, step: int) -> None:
        self.counts: Counter[str] = Counter()  # by reason
        self.num_scored = 0
        self._function = function
        step = max(FEWEST, step)
        self._last: deque[bool] = deque(maxlen=step)  # True where there is no value
        # values of training, None without; columns teach even where all values are equal
        self._barren: deque[float | None] = deque(maxlen=BARREN_STEPS * step)
        self._values: Counter[float | None] = Counter()  # of those
        self._num_failed = 0  # of the last
        self._told = set[tuple[str, DropReason]]()
        self._detail = ""  # of the last one

    def add(self, score: Score, *, task: str, trains: bool) -> str | None:
        """Count a score; a line for the user where it is the first failure of its kind."""
        self.num_scored += score.value is not None
        self._num_failed += (score.value is None) - (len(self._last) == self._last.maxlen and self._last[0])
        self._last.append(score.value is None)
        if trains and not score.columns and score.failure is not DropReason.REWARD_TIMEOUT:
            self._add_to_barren(score.value)
        if score.value is not None:
            return None
        reason = score.failure or DropReason.REWARD_FAILED
        self.counts[reason] += 1
        self._detail = score.detail
        if (task, reason) in self._told:
            return None
        self._told.add((task, reason))
        of_task = f" of task {task!r}" if task else ""
        return (
            f"reward.function={self._function}: {score.trajectory_id}{of_task} could not be scored: {score.detail}"
        )

    def _add_to_barren(self, value: float | None) -> None:
        if len(self._barren) == self._barren.maxlen:
            gone = self._barren[0]
            self._values[gone] -= 1
            if not self._values[gone]:
                del self._values[gone]
        self._barren.append(value)
        self._values[value] += 1

    @property
    def text(self) -> str:
        """E.g. "12 of 480 responses could not be scored (reward_failed 12)"; "" where none failed."""
        if not self.counts:
            return ""
        failed = self.counts.total()
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.counts.items()))
        return f"{failed} of {self.num_scored + failed} responses could not be scored ({reasons})"

    @property
    def fault(self) -> str | None:
        """Why the run has to end: nearly all of a step fails, or what fails leaves nothing to learn from."""
        number = len(self._last)
        if number == self._last.maxlen and self._num_failed >= NEARLY_ALL * number:
            return self._sentence(self._num_failed, number, "")
        number, failed = len(self._barren), self._values[None]
        if number == self._barren.maxlen and SOME * number <= failed < number and len(self._values) == 2:
            value = next(value for value in self._values if value is not None)
            return self._sentence(failed, number, f", and all others got {value:g}, which teaches nothing")
        return None

    def _sentence(self, failed: int, number: int, rest: str) -> str:
        return (
            f"reward.function={self._function}: {failed} of the last {number} responses could not be scored{rest};"
            f" the last: {self._detail}; mend it and go on with --resume"
        )
