"""Failed scores of a run: it counts them, reports some to the user, and decides when the run must end.

`orchestrator.scoring` adds every score with its time and acts on the answers. The ledger has each failure, too
(law 6). A run ends in two cases:

- *Nothing can be scored*: the first `FEWEST` training responses fail, or evaluated ones under `laminar eval`, and
  the reward never gave a value, not even in a trial. A value shows that a service is only down.
- *An outage lasts*: nine tenths of every step of training fail for `OUTAGE_S` seconds. A reward that fails now and
  then never gets there, and the run waits for a service that is down.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from laminar_py.records.codec import IntArray
from laminar_py.records.reasoning import TAGS, opened_reasoning
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason, FinishReason, Prompt

FEWEST = 32  # responses: fewer are no evidence
NEARLY_ALL = 0.9  # share of a step
OUTAGE_S = 600.0  # a verifier may be down for so long
WARN_S = 60.0  # between two warnings about an outage


class ScoreFailures:
    """Counts the failed scores of the reward `title`. A learner step has `step` new trajectories.

    `trains` is False under `laminar eval`. The user gets one line for each task and reason, so that an unreliable
    reward does not fill the terminal.
    """

    def __init__(self, title: str, *, step: int, trains: bool = True) -> None:
        self.counts: Counter[str] = Counter()  # by reason
        self.num_scored = 0
        self.fault: str | None = None
        """Why the run must end; None while it may continue."""
        self._title = title
        self._step_size = max(FEWEST, step)
        self._trains = trains
        self._num_in_step = self._num_failed = 0  # training responses of the current step
        self._num_decisive = 0  # failures that can end the run: of training, or under `eval`
        self._gave_value = False
        self._since: float | None = None  # start of the outage: end of the first failed step in a row
        self.is_outage = False
        """True after a step in which nearly all responses failed, until the next value."""
        self._reported_s = -math.inf  # time of the last line about the outage
        self._reported = set[tuple[str, DropReason]]()
        self._detail = ""  # of the last failure

    def add_trial(self, score: Score) -> None:
        """Note whether a trial, or a score that counts like one, had a value."""
        self._gave_value |= score.value is not None

    def add_score(
        self, score: Score, *, task: str, trains: bool, now_s: float, own_reward: bool = False
    ) -> str | None:
        """Count a score. Returns a line for the user about an outage or a new kind of failure, else None.

        `own_reward` is True for an evaluation set with terms of its own, whose values are no evidence for
        training.
        """
        if not (own_reward and self._trains):
            self.add_trial(score)
        self.num_scored += score.value is not None
        line = self._count_failure(score, task=task) if score.value is None else None
        if score.value is None and trains is self._trains:
            self._num_decisive += 1
            if self._num_decisive >= FEWEST and not self._gave_value:
                self._set_fault("no response could be scored")
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

    def _judge(self, score: Score, *, now_s: float) -> str | None:
        """Count a training response, and note or end an outage. Returns a line for the user, else None."""
        self._num_in_step += 1
        self._num_failed += score.value is None
        self.is_outage &= score.value is None
        if self._num_in_step < self._step_size:
            return self._note_outage(now_s) if self.is_outage else None  # few scores come while scorers pause
        failed, self._num_in_step, self._num_failed = self._num_failed, 0, 0
        if failed >= NEARLY_ALL * self._step_size:
            self.is_outage = score.value is None
            return self._note_outage(now_s)
        self._since, self.is_outage = None, False
        return None

    def _note_outage(self, now_s: float) -> str | None:
        """Begin or continue an outage. Returns a warning for the user every `WARN_S` seconds, else None.

        After `OUTAGE_S` seconds it sets `fault`, so that the run ends.
        """
        if self._since is None:
            self._since, self._reported_s = now_s, -math.inf
        left = self._since + OUTAGE_S - now_s
        if left <= 0:
            self._set_fault(f"for {OUTAGE_S:g} s nearly no response could be scored")
        elif self.fault is None and now_s - self._reported_s >= WARN_S:
            self._reported_s = now_s
            return (
                f"reward.use={self._title}: nearly all responses fail, the last: {self._detail};"
                f" waiting, and the run ends in {left:.0f} s"
            )
        return None

    def _set_fault(self, why: str) -> None:
        """Set `fault`, for which the caller ends the run."""
        failed = f"{self.counts.total()} of {self.num_scored + self.counts.total()}"
        self.fault = (
            f"reward.use={self._title}: {why} ({failed} failed), the last: {self._detail}; mend the reward and"
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

    def complaint(self, detail: str, *, title: str) -> str:
        """Return a line for the user about a trial that could not be scored, and why."""
        return f"reward.use={title}: fails on {self.text} (a trial, made up): {detail}"


def trials(prompts: Iterable[Prompt], *, encode: Callable[[str], IntArray], end: int) -> list[Trial]:
    """Make two trials for each prompt: its right answer alone, and an empty response; both end with id `end`."""
    made: list[Trial] = []
    for prompt in prompts:
        of_task = f" of task {prompt.task!r}" if prompt.task else ""
        responses = {prompt.answer: "the right answer", "": "an empty response"}
        closing = TAGS[1] if opened_reasoning(prompt.text) else ""  # an answer stands behind its reasoning
        for answer, kind in responses.items():
            ids = np.append(encode(closing + answer), end).astype(np.int32)
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
