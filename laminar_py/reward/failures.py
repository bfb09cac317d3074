"""Failed scores of a run: how many there are, which the user is told of, and when there are so many that it ends.

Pure; `orchestrator.scoring` hands in every score with its time and acts on the answers. Each failure is on record
too (law 6). Training responses are looked at in steps, `FEWEST` at least. A run ends in three cases:

- *Nothing to learn from*: nine tenths of every step fail for `OUTAGE_S` seconds, or nothing was scored at all by
  the end of a step. A reward that fails now and then never gets there, and a service that is down is waited for.
- *Always late*: a dozen (`LATE`) responses or more, over `TELL_S` seconds, were all out of time, and nothing ever
  had a value. The rest of a step would take as long again and again. Counted are responses that train, or, where
  nothing trains (`laminar eval`), those of the evaluation: a run does not end for its evaluations, which may have
  another reward and longer answers. A value counts wherever the same reward gave it, in trials and evaluations
  too, since such a service is then down and is waited for.
- *Wrong answers fail*: in each of `MIXED_STEPS` steps in a row some failed (`SOME`) and something was scored, and
  all values that were ever seen of this reward, also in trials and evaluations, are one number above 0. No such
  step has taught anything, whatever its failures are. A sparse run has zeros. A solved one whose scores fail now
  and then goes on, since an honest reward gives another value to the trial with an empty response; where that
  failed too, it ends, and `--resume` tries again. Fewer failures than `SOME` leave few groups that differ.
  Time-outs do not count here, nor does a reward whose columns teach by themselves.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from laminar_py.records.codec import IntArray
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason, FinishReason, Prompt

FEWEST = 32  # responses from which anything is concluded
NEARLY_ALL = 0.9  # share of a step
SOME = 0.02  # share of a step
MIXED_STEPS = 4
LATE = 12  # responses
OUTAGE_S = 600.0  # that a verifier may be down
TELL_S = 60.0  # between lines on an outage


class ScoreFailures:
    """Failed scores of the reward `title`; `step` trajectories make a learner step, unless nothing `trains`.

    One failure of each task and reason is told: a reward that fails now and then does not fill the terminal.
    """

    def __init__(self, title: str, *, step: int, trains: bool = True) -> None:
        self.counts: Counter[str] = Counter()  # by reason
        self.num_scored = 0
        self.fault: str | None = None
        """Reason why the run has to end."""
        self._title = title
        self._size = max(FEWEST, step)
        self._trains = trains
        self._in_step = Counter[str]()  # responses of the step in hand: "all", "failed", "late"
        self._mixed = deque[bool](maxlen=MIXED_STEPS)  # True for a step with values and with failures
        self._values = set[float]()  # seen, two at most
        self._columns = False  # True where they teach even if all values are equal
        self._since: float | None = None  # when the first of the last steps that failed ended
        self.is_outage = False
        """True from the end of a step of which nearly all failed to the next value."""
        self._told_s = -math.inf  # when it was last told of that
        self._told = set[tuple[str, DropReason]]()
        self._detail = ""  # of the last failure
        self._purpose = Counter[str]()  # failures by reason of what the run is for: to train, or to evaluate
        self._failed_s = math.inf  # when the first of these was told

    def tried(self, score: Score) -> None:
        """Take note of the value of a trial."""
        if score.value is not None and len(self._values) < 2:
            self._values.add(score.value)

    def add(self, score: Score, *, task: str, trains: bool, now_s: float, own_reward: bool = False) -> str | None:
        """Count a score; a line for the user where it is the first failure of its kind, or of an outage.

        `own_reward`: of an evaluation set with terms of its own, whose values say nothing of those in training.
        """
        if not (own_reward and self._trains):
            self.tried(score)
        self.num_scored += score.value is not None
        self._columns |= bool(score.columns)
        line = self._count_failure(score, task=task) if score.value is None else None
        if score.value is None and trains is self._trains:
            self._end_if_late(score.failure, now_s)
        return (self._judge(score, now_s=now_s) if trains else None) or line

    def _count_failure(self, score: Score, *, task: str) -> str | None:
        reason = score.failure or DropReason.REWARD_FAILED
        self.counts[reason] += 1
        self._detail = score.detail
        if (task, reason) in self._told:
            return None
        self._told.add((task, reason))
        of_task = f" of task {task!r}" if task else ""
        return f"reward.use={self._title}: {score.trajectory_id}{of_task} could not be scored: {score.detail}"

    def _end_if_late(self, failure: DropReason | None, now_s: float) -> None:
        self._purpose[failure or DropReason.REWARD_FAILED] += 1
        self._failed_s = min(self._failed_s, now_s)
        all_late = set(self._purpose) == {DropReason.REWARD_TIMEOUT} and not self._values
        if all_late and self._purpose.total() >= LATE and now_s - self._failed_s >= TELL_S:
            self._end(f"every response {'to train on' if self._trains else 'so far'} was out of time")

    def _judge(self, score: Score, *, now_s: float) -> str | None:
        """Count a response of training; a line at the end of a step that begins an outage, or goes on with it."""
        step, size = self._in_step, self._size
        step["all"] += 1
        step["failed"] += score.value is None
        step["late"] += score.failure is DropReason.REWARD_TIMEOUT
        self.is_outage &= score.value is None
        if step["all"] < size:
            return self._note_outage(now_s) if self.is_outage else None  # few come while scorers rest
        failed, raised = step["failed"], step["failed"] - step["late"]
        step.clear()
        self._mixed.append(failed < size and raised >= SOME * size)
        self._end_if_mixed()
        if failed >= NEARLY_ALL * size:
            self.is_outage = score.value is None
            return self._note_outage(now_s)
        self._since, self.is_outage = None, False
        return None

    def _note_outage(self, now_s: float) -> str | None:
        if self._since is None:
            self._since, self._told_s = now_s, -math.inf
        left = self._since + OUTAGE_S - now_s
        if not self.num_scored:
            self._end("no response could be scored")
        elif left <= 0:
            self._end(f"for {OUTAGE_S:g} s nearly no response could be scored")
        elif now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            return (
                f"reward.use={self._title}: nearly all responses fail, the last: {self._detail};"
                f" waiting, and the run ends in {left:.0f} s"
            )
        return None

    def _end_if_mixed(self) -> None:
        if self._mixed.count(True) < MIXED_STEPS or self._columns or len(self._values) != 1:
            return
        (value,) = self._values
        if value > 0:
            self._end(
                f"some of each of {MIXED_STEPS} steps could not be scored, and all others got {value:g}, which"
                " teaches nothing"
            )

    def _end(self, why: str) -> None:
        failed = f"{self.counts.total()} of {self.num_scored + self.counts.total()}"
        self.fault = (
            f"reward.use={self._title}: {why} ({failed} failed), the last: {self._detail}; mend it and go"
            " on with --resume"
        )

    @property
    def text(self) -> str:
        """E.g. "12 of 480 responses could not be scored (reward_failed 12)"; "" where none failed."""
        if not self.counts:
            return ""
        failed = self.counts.total()
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.counts.items()))
        return f"{failed} of {self.num_scored + failed} responses could not be scored ({reasons})"


@dataclass(frozen=True, slots=True)
class Trial:
    """A made-up response, e.g. the right answer alone to prompt "p0"."""

    request: ScoringRequest
    text: str  # says what it is

    def complaint(self, score: Score, *, title: str) -> str:
        """Line for the user on a trial that has no value."""
        return f"reward.use={title}: fails on {self.text} (a trial, made up): {score.detail}"


def trials(prompts: Iterable[Prompt], *, encode: Callable[[str], IntArray], end: int) -> list[Trial]:
    """Trials of the reward with each prompt's answer alone, and with an empty response; `end` is the last id."""
    made: list[Trial] = []
    for prompt in prompts:
        of_task = f" of task {prompt.task!r}" if prompt.task else ""
        responses = {prompt.answer: "the right answer", "": "an empty response"}
        for answer, kind in responses.items():
            ids = np.append(encode(answer), end).astype(np.int32)
            request = ScoringRequest(
                trajectory_id=f"trial/{len(made)}",
                prompt=prompt.text,
                response="",
                answer=prompt.answer,
                task=prompt.task,
                finish_reason=FinishReason.STOP,
                prompt_ids=prompt.ids,
                response_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                fields_json=prompt.fields_json,
                environment_reward=float(bool(answer)),
            )
            made.append(Trial(request, f"{kind} to prompt {prompt.id!r}{of_task}"))
    return made
