"""Failed scores of a run: it counts them, reports some to the user, and decides when the run must end.

`orchestrator.scoring` adds every score with its time and acts on the answers. The ledger has each failure, too
(law 6). This module looks at training responses in steps of at least `FEWEST`. A run ends in three cases:

- *Nothing to learn from*: nine tenths of every step fail for `OUTAGE_S` seconds, or a whole step has no score at
  all. A reward that fails now and then never gets there, and the run waits for a service that is down.
- *Always late*: at least `LATE` responses, over `WARN_S` seconds, all timed out, and the reward never gave a
  value. Only training responses count, or evaluated responses under `laminar eval`: an evaluation inside a run
  may have another reward and longer answers, and does not end the run. A value of the same reward counts wherever
  it came from, trials and evaluations included: it shows that the service works and is only down.
- *Wrong answers fail*: in each of `MIXED_STEPS` steps in a row, some responses failed (`SOME`) and some had a
  score, and every value of this reward so far, trials and evaluations included, is the same number above 0. Then
  no step has taught anything. A run with sparse rewards has zeros, so it continues. So does a solved run whose
  scores fail now and then: an honest reward gives another value to the trial with an empty response. If that trial
  failed too, the run ends, and `--resume` tries again. Timeouts do not count here, nor do rewards whose columns
  teach by themselves.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from laminar_py.records.codec import IntArray
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason, FinishReason, Prompt

FEWEST = 32  # responses: fewer are no evidence
NEARLY_ALL = 0.9  # share of a step
SOME = 0.02  # share of a step
MIXED_STEPS = 4
LATE = 12  # responses
OUTAGE_S = 600.0  # a verifier may be down for so long
WARN_S = 60.0  # between two warnings about an outage


class ScoreFailures:
    """Failed scores of the reward `title`. A learner step has `step` trajectories; `trains` is False for `eval`.

    It reports one failure of each task and reason, so that an unreliable reward does not fill the terminal.
    """

    def __init__(self, title: str, *, step: int, trains: bool = True) -> None:
        self.counts: Counter[str] = Counter()  # by reason
        self.num_scored = 0
        self.fault: str | None = None
        """Why the run must end; None while it may continue."""
        self._title = title
        self._size = max(FEWEST, step)
        self._trains = trains
        self._in_step = Counter[str]()  # responses of the current step: "all", "failed", "late"
        self._mixed = deque[bool](maxlen=MIXED_STEPS)  # True for a step with values and with failures
        self._values = set[float]()  # distinct values so far, two at most
        self._columns = False  # True if a score had columns, which teach even if all values are equal
        self._since: float | None = None  # start of the outage: end of the first failed step in a row
        self.is_outage = False
        """True after a step in which nearly all responses failed, until the next value."""
        self._reported_s = -math.inf  # time of the last line about the outage
        self._reported = set[tuple[str, DropReason]]()
        self._detail = ""  # of the last failure
        self._decisive = Counter[str]()  # by reason, failures that can end the run: of training, or under `eval`
        self._failed_s = math.inf  # time of the first decisive failure

    def add_trial(self, score: Score) -> None:
        """Remember the value of a trial."""
        if score.value is not None and len(self._values) < 2:
            self._values.add(score.value)

    def add_score(
        self, score: Score, *, task: str, trains: bool, now_s: float, own_reward: bool = False
    ) -> str | None:
        """Count a score. Returns a line for the user about a first failure of its kind or an outage, else None.

        `own_reward` is True for an evaluation set with terms of its own, whose values are no evidence for
        training.
        """
        if not (own_reward and self._trains):
            self.add_trial(score)
        self.num_scored += score.value is not None
        self._columns |= bool(score.columns)
        line = self._count_failure(score, task=task) if score.value is None else None
        if score.value is None and trains is self._trains:
            self._end_if_late(score.failure, now_s)
        return (self._judge(score, now_s=now_s) if trains else None) or line

    def _count_failure(self, score: Score, *, task: str) -> str | None:
        """Count a failed score. Returns a line for the user about the first of its task and reason, else None."""
        reason = score.failure or DropReason.REWARD_FAILED
        self.counts[reason] += 1
        self._detail = score.detail
        if (task, reason) in self._reported:
            return None
        self._reported.add((task, reason))
        of_task = f" of task {task!r}" if task else ""
        return f"reward.use={self._title}: {score.trajectory_id}{of_task} could not be scored: {score.detail}"

    def _end_if_late(self, failure: DropReason | None, now_s: float) -> None:
        """Count a decisive failure; end the run if all of at least `LATE` timed out over `WARN_S` seconds."""
        self._decisive[failure or DropReason.REWARD_FAILED] += 1
        self._failed_s = min(self._failed_s, now_s)
        all_late = set(self._decisive) == {DropReason.REWARD_TIMEOUT} and not self._values
        if all_late and self._decisive.total() >= LATE and now_s - self._failed_s >= WARN_S:
            self._end_run(f"every response {'to train on' if self._trains else 'so far'} was out of time")

    def _judge(self, score: Score, *, now_s: float) -> str | None:
        """Count a training response. Returns a line for the user while an outage lasts, else None."""
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
        """Begin or continue an outage. Returns a warning for the user each `WARN_S`, else None.

        Ends the run after `OUTAGE_S`, or at once if no response ever got a score.
        """
        if self._since is None:
            self._since, self._reported_s = now_s, -math.inf
        left = self._since + OUTAGE_S - now_s
        if not self.num_scored:
            self._end_run("no response could be scored")
        elif left <= 0:
            self._end_run(f"for {OUTAGE_S:g} s nearly no response could be scored")
        elif now_s - self._reported_s >= WARN_S:
            self._reported_s = now_s
            return (
                f"reward.use={self._title}: nearly all responses fail, the last: {self._detail};"
                f" waiting, and the run ends in {left:.0f} s"
            )
        return None

    def _end_if_mixed(self) -> None:
        """End the run if some responses of each of the last steps failed, and all values so far are equal."""
        if self._mixed.count(True) < MIXED_STEPS or self._columns or len(self._values) != 1:
            return
        (value,) = self._values
        if value > 0:
            self._end_run(
                f"some of each of {MIXED_STEPS} steps could not be scored, and all others got {value:g}, which"
                " teaches nothing"
            )

    def _end_run(self, why: str) -> None:
        failed = f"{self.counts.total()} of {self.num_scored + self.counts.total()}"
        self.fault = (
            f"reward.use={self._title}: {why} ({failed} failed), the last: {self._detail}; mend it and"
            " continue with --resume"
        )

    @property
    def text(self) -> str:
        """A summary, e.g. "12 of 480 responses could not be scored (reward_failed 12)"; "" if none failed."""
        if not self.counts:
            return ""
        failed = self.counts.total()
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.counts.items()))
        return f"{failed} of {self.num_scored + failed} responses could not be scored ({reasons})"


@dataclass(frozen=True, slots=True)
class Trial:
    """A made-up response on which a run tries its reward, e.g. the right answer alone to prompt "p0"."""

    request: ScoringRequest
    text: str  # describes it for the user

    def complaint(self, score: Score, *, title: str) -> str:
        """Return a line for the user about a trial that could not be scored."""
        return f"reward.use={title}: fails on {self.text} (a trial, made up): {score.detail}"


def trials(prompts: Iterable[Prompt], *, encode: Callable[[str], IntArray], end: int) -> list[Trial]:
    """Make two trials for each prompt: its right answer alone, and an empty response; both end with id `end`."""
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
