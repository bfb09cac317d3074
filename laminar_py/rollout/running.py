"""A trajectory on a replica: the tokens from there, and how much of them was told. Owned by `replica`.

Invariant: every token is told once, in order, with the version that the engine stamped on it; so are its sampling
mask and, stream by stream, the experts of every position, where they are recorded.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.engine import Delta, GenerateRequest
from laminar_py.records.environment import ModelTurn, TurnPart
from laminar_py.records.pieces import Piece, TokensRef
from laminar_py.records.recordings import (
    RoutedExperts,
    SamplingMask,
    join_experts,
    join_masks,
    pack_experts,
    pack_mask,
)
from laminar_py.records.replica import Assignment, Held, Progress
from laminar_py.records.roles import RoleCredit
from laminar_py.records.spans import Span, add_span, clip_spans, covers, replace_spans, shift_spans
from laminar_py.records.trajectory import Break, Cap, DropReason, FinishReason
from laminar_py.records.tree import context_tokens, is_tree
from laminar_py.rollout.branches import in_context

AnyArray = TypeVar("AnyArray", IntArray, FloatArray)
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


class StreamState(Enum):
    """Place of a trajectory on its replica; `Streams` makes the transitions."""

    OUTSIDE = "outside"  # waits until the engine serves
    IN_ENGINE = "in engine"
    AWAY = "away"  # its environment works on its last turn; it holds no slot of the engine
    INTERRUPTED = "interrupted"  # by new weights, under which it goes on here
    ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class Running:
    """An assignment as it runs, e.g. `begin(assignment, now)`; with a prefix if it was interrupted before."""

    assignment: Assignment
    submitted_s: float
    length: int  # response tokens so far
    stream: int  # place in the response of the present stream's first token
    routed: int  # leading positions whose experts are recorded
    prefix: IntArray | None = None  # [length told], once it is read
    told_spans: tuple[Span, ...] = ()  # of the prefix
    told_logprobs: FloatArray = field(default_factory=lambda: _NO_LOGPROBS)  # of the prefix
    ids: list[IntArray] = field(default_factory=list)  # not told yet
    logprobs: list[FloatArray] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # reach back where the engine corrected itself
    masks: list[SamplingMask | None] = field(default_factory=list)  # one for each of `ids`
    experts: list[RoutedExperts] = field(default_factory=list)
    noted: int = 0  # of the deltas that were not told, those in the journal, the first of them
    first_token_s: float | None = None
    state: StreamState = StreamState.OUTSIDE
    is_abandoned: bool = False  # its stream was aborted: the end of a turn ends it here
    cut: Cap | None = None
    away_since_s: float = 0.0  # its environment works since then, while it is `AWAY`
    environment_s: float = 0.0  # that its environment worked, not told yet
    reward: float | None = None  # of its environment
    roles: tuple[RoleCredit, ...] = ()  # that its environment gave rewards of their own
    listens: bool = False  # its environment is told the turn in hand as it is sampled
    listened_from: int = 0  # response tokens before that turn
    heard: int = 0  # leading response tokens that it was told
    task: "asyncio.Task[None] | None" = None  # that brings it into the engine, and may read its stream
    is_open: bool = False  # a stream of the engine has not had its last word
    over: "asyncio.Future[None] | None" = None  # while somebody waits for the end of that stream

    def stream_end(self) -> "asyncio.Future[None]":
        """The end of the stream that is open."""
        self.over = self.over or asyncio.get_running_loop().create_future()
        return self.over

    def close_stream(self) -> None:
        """Let those go on who wait for the end of the stream."""
        self.is_open = False
        over, self.over = self.over, None
        if over is not None and not over.done():
            over.set_result(None)

    def request(self) -> GenerateRequest:
        """Ask the engine, now or again: a new stream begins where the response stands."""
        item, turn_end = self.assignment, self._turn_end
        sampling = item.sampling
        if turn_end is not None and turn_end < sampling.max_new_tokens:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=turn_end)
        self.stream = self.length
        whole = GenerateRequest(
            rid=item.trajectory_id,
            group_id=item.group_id,
            prompt_ids=item.prompt_ids,
            prefix_ids=self.response_ids,
            sampling=sampling,
            routed=self.routed,
            has_turns=item.problem is not None,
            one_by_one=self.listens,
        )
        return in_context(whole, self.all_spans) if self._is_tree else whole

    def held(self, length: int) -> Held:
        """Entry of a survey, with so many tokens of response."""
        context = len(self.assignment.prompt_ids) + length
        if self._is_tree:
            context = context_tokens(len(self.assignment.prompt_ids), self.all_spans) + length - self.length
        return Held(self.assignment.trajectory_id, context, length)

    @property
    def queues(self) -> bool:
        """True where it waits for its first token here, and not for its environment."""
        return self.first_token_s is None and self.state is not StreamState.AWAY

    @property
    def _is_tree(self) -> bool:
        if self.assignment.problem is None:  # nobody but an environment begins a branch
            return False
        return is_tree(self.told_spans) or is_tree(self.spans)

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
            self.masks.append(delta.sampling_mask)
            self.length = end
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

    def observe(self, ids: IntArray, *, follows: int | None = None, max_tokens: int | None = None) -> None:
        """Append what the environment wrote, as it is, if it wrote anything.

        See `Span` for what it `follows`; `max_tokens` limits the turn behind it.
        """
        if not len(ids):
            return
        start, self.length = self.length, self.length + len(ids)
        add_span(self.spans, Span(None, start, self.length, follows=follows, turn_limit=max_tokens))
        self.ids.append(ids)
        self.logprobs.append(np.zeros(len(ids), np.float32))
        self.masks.append(SamplingMask(np.zeros(len(ids), np.int32), _NO_IDS))

    @property
    def response_ids(self) -> IntArray:
        """[L] Response so far, once the prefix is read."""
        assert self.prefix is not None, f"{self.assignment.trajectory_id} goes on before what it has was read"
        return np.concatenate([self.prefix, *self.ids])

    @property
    def room(self) -> int:
        """Tokens that it may still get by the cap on a response."""
        return self.assignment.sampling.max_new_tokens - self.length

    @property
    def all_spans(self) -> tuple[Span, ...]:
        """Spans of the response so far."""
        return replace_spans(self.told_spans, tuple(self.spans))

    @property
    def awaits_environment(self) -> bool:
        """True where an environment has the next word: before the first turn of the model, and after each."""
        if self.assignment.problem is None:
            return False
        if not self.length:
            return True
        if self.all_spans[-1].version is None:
            return False
        return self._is_full or int(self.response_ids[-1]) in self.assignment.sampling.stop_ids

    def turn_ended(self, reason: FinishReason) -> bool:
        """True where the engine's last word ends a turn, which its environment answers, and not the response."""
        if self.assignment.problem is None:
            return False
        return reason is FinishReason.STOP or (reason is FinishReason.LENGTH and self._is_full)

    @property
    def _is_full(self) -> bool:
        """True where the turn in hand has all tokens that its environment lets it have, and others may follow."""
        end = self._turn_end
        return end is not None and self.length >= end and self.room > 0

    @property
    def _turn_end(self) -> int | None:
        """Response tokens at which the environment's limit cuts the turn in hand; None without a limit."""
        if self.assignment.problem is None:
            return None
        last = next((span for span in reversed(self.all_spans) if span.version is None), None)
        return None if last is None or last.turn_limit is None else last.end + last.turn_limit

    def turn(self) -> ModelTurn:
        """Ask of its environment."""
        problem = self.assignment.problem
        assert problem is not None, f"{self.assignment.trajectory_id} has no environment"
        return ModelTurn(
            trajectory_id=self.assignment.trajectory_id,
            problem=problem,
            response_ids=self.response_ids,
            spans=self.all_spans,
            logprobs=_last(self.logprobs, self.length - self._turn_start, self.told_logprobs),
        )

    def begin_turn(self, *, listens: bool) -> None:
        """Have `part` give what is sampled from here on, to an environment that `listens`."""
        self.listens, self.listened_from, self.heard = listens, self.length, self.length

    def part(self) -> TurnPart | None:
        """Tokens of the turn in hand that its environment was not told yet; None if there are none."""
        count = self.length - self.heard
        if not count:
            return None
        place, self.heard = self.heard - self.listened_from, self.length
        prefix = _NO_IDS if self.prefix is None else self.prefix
        return TurnPart(
            trajectory_id=self.assignment.trajectory_id,
            turn_start=self.listened_from,
            place=place,
            ids=_last(self.ids, count, prefix),
            logprobs=_last(self.logprobs, count, self.told_logprobs),
        )

    @property
    def _turn_start(self) -> int:
        """Response tokens before the last turn of the model."""
        return next((span.end for span in reversed(self.all_spans) if span.version is None), 0)

    @property
    def told(self) -> int:
        """Response tokens that were told."""
        return self.length - sum(map(len, self.ids))

    def note(self, now: float) -> Piece | None:
        """Tokens that the journal has not got yet, which count as noted from here on; None if there are none."""
        if self.noted == len(self.ids):
            return None
        piece = self._piece(self.noted, now)
        self.noted = len(self.ids)
        return piece

    def piece(self, now: float) -> Piece | None:
        """Everything that was not told yet, None if that is nothing; it counts as told with its `progress`."""
        if not self.ids and not self.experts and self.reward is None:
            return None
        return self._piece(0, now, experts=pack_experts(join_experts(self.experts)) if self.experts else None)

    def _piece(self, first: int, now: float, *, experts: bytes | None = None) -> Piece:
        """Tokens of the deltas that were not told, without the first few."""
        name, ids, mask = self.assignment.trajectory_id, self.ids[first:], _joined(self.masks[first:])
        count = sum(map(len, ids))
        rows = count if mask is None else len(mask.counts)
        assert rows == count, f"{name}: {count} tokens with {rows} sampling masks"
        start = self.length - count
        return Piece(
            trajectory_id=name,
            epoch=self.assignment.epoch,
            start=start,
            spans=clip_spans(self.spans, start) if first else tuple(self.spans),
            ids=b"".join([array.tobytes() for array in ids]),
            logprobs=b"".join([array.tobytes() for array in self.logprobs[first:]]),
            mask=None if mask is None else pack_mask(mask),
            experts=experts,
            used_s=self.used_s(now),
            reward=self.reward,
            roles=self.roles,
        )

    def progress(
        self,
        tokens: TokensRef | None,
        reason: FinishReason | None,
        now: float,
        *,
        broken: Break | None = None,
        failure: DropReason | None = None,
        detail: str = "",
    ) -> Progress:
        """News of it, with the `tokens` of its `piece`, which was stored."""
        start = self.told
        if tokens is not None:
            if reason is None:  # else nobody asks the engine to go on from it
                self.prefix = np.concatenate([_NO_IDS if self.prefix is None else self.prefix, *self.ids])
                self.told_spans = self.all_spans
                if self.assignment.problem is not None:
                    self.told_logprobs = np.concatenate([self.told_logprobs, *self.logprobs])
            self.ids, self.logprobs, self.masks, self.experts, self.noted = [], [], [], [], 0
        spans, self.spans = tuple(self.spans), []
        environment_s, self.environment_s = self.environment_s, 0.0
        first = now if self.first_token_s is None else self.first_token_s
        return Progress(
            trajectory_id=self.assignment.trajectory_id,
            epoch=self.assignment.epoch,
            start=start,
            tokens=tokens,
            spans=spans,
            finish_reason=reason,
            cut=self.cut,
            queue_s=first - self.submitted_s,
            generate_s=now - self.submitted_s,
            broken=broken,
            failure=failure,
            detail=detail,
            environment_s=environment_s,
        )


def begin(assignment: Assignment, now: float) -> Running:
    """An assignment as it is taken up; what it has of a response is read before it enters the engine."""
    length = assignment.length
    return Running(
        assignment=assignment,
        submitted_s=now,
        prefix=None if length else _NO_IDS,
        length=length,
        stream=length,
        routed=assignment.routed,
    )


def handed_back(assignment: Assignment, *, lost: str = "") -> Progress:
    """News of one that never started here, with what is `lost` of it if that is why."""
    return Progress(
        trajectory_id=assignment.trajectory_id,
        epoch=assignment.epoch,
        start=assignment.length,
        finish_reason=None if lost else FinishReason.ABORT,
        lost=bool(lost),
        detail=lost,
    )


def _joined(masks: Sequence[SamplingMask | None]) -> SamplingMask | None:
    """Mask of all these tokens, None where the whole vocabulary was open to each, or none are recorded."""
    recorded = [mask for mask in masks if mask is not None]
    return join_masks(recorded) if any(mask.counts.any() for mask in recorded) else None


def _last(arrays: Sequence[AnyArray], count: int, told: AnyArray) -> AnyArray:
    """[count] The last values of what was `told` and of the arrays since then."""
    found, place = 0, len(arrays)
    while found < count and place:
        place -= 1
        found += len(arrays[place])
    joined = np.concatenate(arrays[place:] if 0 < count <= found else [told, *arrays])
    return joined[len(joined) - count :]
