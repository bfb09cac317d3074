"""A trajectory on a replica: the tokens from there, and how much of them was reported. Owned by `replica`.

Invariant: every token is reported once, in order, with the version that the engine stamped on it; so are its
sampling mask and, stream by stream, the experts of every position, where they are recorded.
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.engine import Delta, GenerateRequest
from laminar_py.records.recordings import RoutedExperts, SamplingMask, join_experts, join_masks
from laminar_py.records.replica import Assignment, Held, Progress
from laminar_py.records.spans import add_span, covers, replace_spans, shift_spans
from laminar_py.records.trajectory import Break, FinishReason, Span

_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


class StreamState(Enum):
    """Place of a trajectory on its replica; `Streams` makes the transitions."""

    OUTSIDE = "outside"  # waits until the engine serves
    IN_ENGINE = "in engine"
    INTERRUPTED = "interrupted"  # by new weights, under which it goes on here
    ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class Running:
    """An assignment as it runs, e.g. `begin(assignment, now)`; with a prefix if it was interrupted before."""

    assignment: Assignment
    submitted_s: float
    prefix: IntArray  # [length reported]
    length: int  # response tokens so far, the prefix included
    reported_s: float
    stream: int  # place in the response of the present stream's first token
    routed: int  # leading positions whose experts are recorded
    ids: list[IntArray] = field(default_factory=list)  # not reported yet
    logprobs: list[FloatArray] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # reach back where the engine corrected itself
    masks: list[SamplingMask] = field(default_factory=list)
    experts: list[RoutedExperts] = field(default_factory=list)
    first_token_s: float | None = None
    state: StreamState = StreamState.OUTSIDE
    wall_cut: bool = False
    task: "asyncio.Task[None] | None" = None

    def request(self) -> GenerateRequest:
        """Ask the engine, now or again: a new stream begins where the response stands."""
        item = self.assignment
        self.stream = self.length
        so_far = np.concatenate([self.prefix, *self.ids])
        return GenerateRequest(
            rid=item.trajectory_id,
            group_id=item.group_id,
            prompt_ids=item.prompt_ids,
            prefix_ids=so_far,
            sampling=item.sampling,
            routed=self.routed,
        )

    def held(self) -> Held:
        """Entry of a survey."""
        return Held(self.assignment.trajectory_id, len(self.assignment.prompt_ids) + self.length, self.length)

    def used_s(self, now: float) -> float:
        """Seconds of generation, those on earlier replicas included."""
        here = 0.0 if self.first_token_s is None else now - self.first_token_s
        return self.assignment.used_s + here

    def take(self, delta: Delta, now: float) -> None:
        """Append what the engine delivered."""
        if len(delta.ids):
            if self.first_token_s is None:
                self.first_token_s = now
            start, end = self.length, self.length + len(delta.ids)
            add_span(self.spans, Span(delta.version, start, end, delta.kv_version))
            self.ids.append(delta.ids)
            self.logprobs.append(delta.logprobs)
            self.length = end
            if delta.sampling_mask is not None:
                self.masks.append(delta.sampling_mask)
        if delta.finish_reason is not None:
            self._take_last(delta)

    def _take_last(self, delta: Delta) -> None:
        """The engine's last word on the present stream."""
        name, experts = self.assignment.trajectory_id, delta.routed_experts
        if delta.spans:
            sure = shift_spans(delta.spans, self.stream)
            assert covers(sure, self.stream, self.length), f"{name}: {sure} for [{self.stream}, {self.length})"
            self.spans = list(replace_spans(self.spans, sure))
        if experts is not None and experts.positions:
            assert experts.start == self.routed, f"{name}: experts from {experts.start}, not from {self.routed}"
            self.experts.append(experts)
            self.routed += experts.positions

    def progress(
        self, reason: FinishReason | None, now: float, *, broken: Break | None = None, refusal: str = ""
    ) -> Progress:
        """Everything not reported yet, which counts as reported from here on."""
        ids = np.concatenate(self.ids) if self.ids else _NO_IDS
        logprobs = np.concatenate(self.logprobs) if self.logprobs else _NO_LOGPROBS
        mask = join_masks(self.masks) if self.masks else None
        name, rows = self.assignment.trajectory_id, len(ids) if mask is None else len(mask.counts)
        assert rows == len(ids), f"{name}: {len(ids)} tokens with {rows} sampling masks"
        first = now if self.first_token_s is None else self.first_token_s
        progress = Progress(
            trajectory_id=name,
            epoch=self.assignment.epoch,
            start=self.length - len(ids),
            ids=ids,
            logprobs=logprobs,
            spans=tuple(self.spans),
            finish_reason=reason,
            wall_cut=self.wall_cut,
            queue_s=first - self.submitted_s,
            generate_s=now - self.submitted_s,
            sampling_mask=mask,
            routed_experts=join_experts(self.experts) if self.experts else None,
            broken=broken,
            refusal=refusal,
        )
        self.prefix = np.concatenate([self.prefix, ids])
        self.ids, self.logprobs, self.spans, self.masks, self.experts = [], [], [], [], []
        self.reported_s = now
        return progress


def begin(assignment: Assignment, now: float) -> Running:
    """An assignment as it is taken up."""
    length = len(assignment.prefix_ids)
    return Running(
        assignment=assignment,
        submitted_s=now,
        prefix=assignment.prefix_ids,
        length=length,
        reported_s=now,
        stream=length,
        routed=assignment.routed,
    )


def handed_back(assignment: Assignment) -> Progress:
    """The report of one that never started here."""
    start = len(assignment.prefix_ids)
    return Progress(
        trajectory_id=assignment.trajectory_id,
        epoch=assignment.epoch,
        start=start,
        ids=_NO_IDS,
        logprobs=_NO_LOGPROBS,
        spans=(),
        finish_reason=FinishReason.ABORT,
    )
