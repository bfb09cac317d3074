"""One trajectory on a replica: what it generated there, and how much of that was reported. Owned by `replica`.

Invariant: every token is reported once, in order, with the version that the engine stamped on it.
"""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from laminar_py.codec import FloatArray, IntArray
from laminar_py.types import Assignment, Delta, FinishReason, GenerateRequest, Progress, Span

_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


@dataclass(slots=True)
class Running:
    """State of an assignment, e.g. `begin(assignment, now)`; `prefix` has tokens if it was interrupted before."""

    assignment: Assignment
    submitted_s: float
    prefix: IntArray  # [length reported] what a (re)submission continues from
    length: int  # response tokens so far, the prefix included
    reported_s: float
    ids: list[IntArray] = field(default_factory=list)  # not reported yet
    logprobs: list[FloatArray] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    first_token_s: float | None = None
    resubmit: bool = False  # interrupted for new weights, goes on here
    wall_cut: bool = False
    in_engine: bool = False
    task: "asyncio.Task[None] | None" = None

    def request(self) -> GenerateRequest:
        """What the engine is asked for, now or again."""
        item = self.assignment
        return GenerateRequest(item.trajectory_id, item.group_id, item.prompt_ids, self.prefix, item.sampling)

    def used_s(self, now: float) -> float:
        """Seconds of generation, those on earlier replicas included."""
        here = 0.0 if self.first_token_s is None else now - self.first_token_s
        return self.assignment.used_s + here

    def take(self, delta: Delta, now: float) -> None:
        """Append what the engine delivered."""
        if not len(delta.ids):
            return
        if self.first_token_s is None:
            self.first_token_s = now
        start, end = self.length, self.length + len(delta.ids)
        if self.spans and self.spans[-1].version == delta.version:
            self.spans[-1] = Span(delta.version, self.spans[-1].start, end)
        else:
            self.spans.append(Span(delta.version, start, end))
        self.ids.append(delta.ids)
        self.logprobs.append(delta.logprobs)
        self.length = end

    def progress(self, reason: FinishReason | None, now: float) -> Progress:
        """All that was not reported yet; it counts as reported from here on."""
        ids = np.concatenate(self.ids) if self.ids else _NO_IDS
        logprobs = np.concatenate(self.logprobs) if self.logprobs else _NO_LOGPROBS
        first = now if self.first_token_s is None else self.first_token_s
        progress = Progress(
            self.assignment.trajectory_id,
            self.assignment.epoch,
            self.length - len(ids),
            ids,
            logprobs,
            tuple(self.spans),
            reason,
            self.wall_cut,
            first - self.submitted_s,
            now - self.submitted_s,
        )
        self.prefix = np.concatenate([self.prefix, ids])
        self.ids, self.logprobs, self.spans = [], [], []
        self.reported_s = now
        return progress


def begin(assignment: Assignment, now: float) -> Running:
    """An assignment as it is taken up."""
    return Running(assignment, now, assignment.prefix_ids, len(assignment.prefix_ids), now)


def handed_back(assignment: Assignment) -> Progress:
    """The report of one that never started here."""
    start = len(assignment.prefix_ids)
    return Progress(
        assignment.trajectory_id, assignment.epoch, start, _NO_IDS, _NO_LOGPROBS, (), FinishReason.ABORT
    )
