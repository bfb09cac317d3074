"""A trajectory that runs on a replica: its tokens, and how many of them were reported. `rollout.streams` owns it.

Every token is reported once, in order, with the version that the engine stamped on it (law 2). If the run records
sampling masks or experts, these are reported too (`tests/rollout/test_replica.py`).

A response can be a tree; then the engine gets only the context of the last branch. Each branch has a seed of its
own, so two branches from one place differ, and a repeated request of a branch draws the same tokens
(`tests/environment/test_truth.py`).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.credit import RoleCredit
from laminar_py.records.engine import Delta, EarlierText, GenerateRequest
from laminar_py.records.environment import ModelTurn
from laminar_py.records.pieces import (
    Piece,
    RoutedExperts,
    SamplingMask,
    TokensRef,
    join_experts,
    join_masks,
    pack_experts,
    pack_mask,
)
from laminar_py.records.replica import Assignment, Progress, TrajectorySummary
from laminar_py.records.spans import (
    Span,
    add_span,
    clip_spans,
    context_of,
    context_tokens,
    covers,
    is_tree,
    last_answer,
    replace_spans,
    shift_spans,
)
from laminar_py.records.stops import Decode, has_stop, tokens_to_stop
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, InterruptReason

_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, which spreads small numbers over all bits


def in_context(request: GenerateRequest, spans: tuple[Span, ...]) -> GenerateRequest:
    """Return a request for the last branch of a tree, from a request with all response tokens and their spans.

    E.g. if the last 15 of 60 response tokens follow the first 41, the engine gets these 56 behind the prompt. The
    cap on new tokens stays the same, and the seed is the branch's own.
    """
    context, sampling = context_of(spans), request.sampling
    root, branch = context.parts[0][0], context.parts[-1][0]
    ids = request.prefix_ids[context.places]
    prompt, group = request.prompt_ids, request.group_id
    if not context.has_prompt:  # the branch begins with a prompt of its own, which no other request shares
        count = next(span.end - span.start for span in spans if span.start == root)
        prompt, ids, group = ids[:count], ids[count:], f"{request.rid}/{root}"
    room = sampling.max_new_tokens - len(request.prefix_ids)
    return msgspec.structs.replace(
        request,
        group_id=group,
        prompt_ids=prompt,
        prefix_ids=ids,
        sampling=msgspec.structs.replace(
            sampling, max_new_tokens=len(ids) + room, seed=(sampling.seed + branch * _ODD) % 2**63
        ),
    )


_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)
_NO_ANSWER = last_answer(())
Array = TypeVar("Array", IntArray, FloatArray)


class StreamState(Enum):
    """States of a trajectory on its replica; `Streams` makes the transitions."""

    OUTSIDE = "outside"  # waits to enter the engine
    IN_ENGINE = "in engine"
    AWAY = "away"  # its environment answers its last turn; it holds no engine slot
    INTERRUPTED = "interrupted"  # by new weights, under which it will continue here
    ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class RunningTrajectory:
    """An assignment that runs, e.g. `begin(assignment, now)`, with the response so far.

    The reported part of the response is the prefix; the lists have the unreported part, with an item per delta.
    """

    assignment: Assignment
    submitted_s: float  # start here, on the replica's clock
    length: int  # response tokens so far
    stream: int  # place in the response of the current stream's first token
    routed: int  # leading positions whose experts are recorded
    prefix: IntArray | None = None  # [reported] tokens; None until they are read from storage
    prefix_spans: tuple[Span, ...] = ()
    earlier: tuple[EarlierText, ...] | None = ()  # for its next request; None until they are read from storage
    prefix_logprobs: FloatArray = field(default_factory=lambda: _NO_LOGPROBS)  # [reported]
    ids: list[IntArray] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # unreported; reach back to versions that the engine corrected
    masks: list[SamplingMask | None] = field(default_factory=list)
    experts: list[RoutedExperts] = field(default_factory=list)
    journaled: int = 0  # leading unreported deltas that are in the journal
    first_token_s: float | None = None
    excused_s: float = 0.0  # since the first token, that does not count as time of generation
    state: StreamState = StreamState.OUTSIDE
    is_aborted: bool = False  # it ends here even if its stream ends a turn
    cut: Cap | None = None  # the cap on seconds or on turns, if it ends the response
    away_since_s: float = 0.0  # start of its environment's work, while it is `AWAY`
    environment_s: float = 0.0  # unreported time of its environment
    reward: float | None = None  # from its environment
    roles: tuple[RoleCredit, ...] = ()  # roles to which its environment gave rewards
    task: "asyncio.Task[None] | None" = None  # brings it into the engine, and may read its stream
    is_open: bool = False  # an engine stream has not ended
    answer: Span = _NO_ANSWER  # its environment's last tokens, which the current stream's turn follows
    has_stopped: bool = False  # a stop string ended that turn, and later tokens of the stream are discarded
    _stream_over: "asyncio.Future[None] | None" = None  # done at the end of that stream; None without a waiter

    def stream_end(self) -> "asyncio.Future[None]":
        """Return a future that is done when the open stream ends; all waiters share it."""
        self._stream_over = self._stream_over or asyncio.get_running_loop().create_future()
        return self._stream_over

    def close_stream(self) -> None:
        """Note that the stream ended, and wake its waiters."""
        self.is_open = False
        over, self._stream_over = self._stream_over, None
        if over is not None and not over.done():
            over.set_result(None)

    def request(self) -> GenerateRequest:
        """Begin a new stream at the end of the response so far, and return its engine request."""
        item, turn_end, sampling = self.assignment, self._turn_end, self.assignment.sampling
        self.answer, self.has_stopped = self._answer, False
        if turn_end is not None and turn_end < sampling.max_new_tokens:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=turn_end)
        self.stream = self.length
        earlier, self.earlier = self.earlier or (), ()
        whole = GenerateRequest(
            rid=item.trajectory_id,
            group_id=item.group_id,
            prompt_ids=item.prompt_ids,
            prefix_ids=self.response_ids,
            sampling=sampling,
            routed=self.routed,
            has_turns=item.problem is not None,
            earlier=earlier,
        )
        return in_context(whole, self.all_spans) if self._is_tree else whole

    def summary(self, length: int) -> TrajectorySummary:
        """Return its entry in a survey, if the engine has generated `length` response tokens so far."""
        prompt, spans = len(self.assignment.prompt_ids), self.all_spans
        context = prompt + length
        if self._is_tree:
            context = context_tokens(prompt, spans) + length - self.length
        answers = [span.end - span.start for span in spans if span.version is None]
        return TrajectorySummary(
            trajectory_id=self.assignment.trajectory_id,
            context=context,
            length=length,
            observed=sum(answers),
            turns=len(answers),
            is_away=self.state is StreamState.AWAY,
        )

    @property
    def is_queued(self) -> bool:
        """Whether it waits for its first token on this replica, and not for its environment."""
        return self.first_token_s is None and self.state is not StreamState.AWAY

    @property
    def _is_tree(self) -> bool:
        """Whether the response has branches."""
        if self.assignment.problem is None:  # only environments begin branches
            return False
        return is_tree(self.prefix_spans) or is_tree(self.spans)

    def used_s(self, now: float) -> float:
        """Return seconds of generation on this and earlier replicas, with waits for environments and weights."""
        here = 0.0 if self.first_token_s is None else now - self.first_token_s - self.excused_s
        return self.assignment.used_s + here

    def append_delta(self, delta: Delta, now: float) -> None:
        """Append a delta's tokens; the last delta of a stream also corrects spans and brings experts."""
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
            self._apply_corrections(delta)

    def cut_at_stop(self, delta: Delta, decode: Decode) -> Delta:
        """Return a delta without tokens behind the turn's first stop string, which ends the stream as STOP."""
        kept = 0 if self.has_stopped else tokens_to_stop(self._last_of_turn, delta.ids, self.answer.stop, decode)
        if kept is None:
            return delta
        self.has_stopped = True
        end, mask, experts = self.length + kept, delta.sampling_mask, delta.routed_experts
        inputs = len(self.assignment.prompt_ids) + end - 1  # the last token is no input
        return msgspec.structs.replace(
            delta,
            ids=delta.ids[:kept],
            logprobs=delta.logprobs[:kept],
            finish_reason=delta.finish_reason and FinishReason.STOP,
            spans=delta.spans and clip_spans(delta.spans, 0, end - self.stream),
            sampling_mask=mask and SamplingMask(mask.counts[:kept], mask.ids[: mask.counts[:kept].sum()]),
            routed_experts=experts and experts.up_to(inputs),
        )

    def _last_of_turn(self, count: int) -> IntArray:
        """Return the last `count` tokens of the current stream's turn, fewer at the turn's start."""
        assert self.prefix is not None, f"{self.assignment.trajectory_id} streams before its prefix was read"
        return _last(self.ids, min(count, self.length - self.answer.end), self.prefix)

    def _apply_corrections(self, delta: Delta) -> None:
        """Replace the stream's spans by the spans in its last delta, if given, and keep the delta's experts."""
        name, experts = self.assignment.trajectory_id, delta.routed_experts
        if delta.spans:
            corrected = shift_spans(delta.spans, self.stream)
            whole = covers(corrected, self.stream, self.length)
            assert whole, f"{name}: the engine's spans {corrected} do not cover [{self.stream}, {self.length})"
            self.spans = list(replace_spans(self.spans, corrected))
        if experts is not None and experts.positions:
            begins = experts.start == self.routed
            assert begins, f"{name}: the engine's experts begin at {experts.start}, not at {self.routed}"
            self.experts.append(experts)
            self.routed += experts.positions

    def append_observation(
        self, ids: IntArray, *, follows: int | None = None, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> None:
        """Append [n] tokens of the environment as they are; `max_tokens` and `stop` limit the model's next turn.

        `follows` is the number of leading response tokens that the new tokens stand behind, None for all.
        """
        if not len(ids):
            return
        start, self.length = self.length, self.length + len(ids)
        span = Span(None, start, self.length, follows=follows, turn_limit=max_tokens, stop=tuple(stop))
        add_span(self.spans, span)
        self.ids.append(ids)
        self.logprobs.append(np.zeros(len(ids), np.float32))
        self.masks.append(SamplingMask(np.zeros(len(ids), np.int32), _NO_IDS))

    @property
    def response_ids(self) -> IntArray:
        """[L] tokens of the response so far, the prefix included, which must have been read."""
        assert self.prefix is not None, f"{self.assignment.trajectory_id} continues before its prefix was read"
        return np.concatenate([self.prefix, *self.ids])

    @property
    def room(self) -> int:
        """Tokens left until the cap on a response."""
        return self.assignment.sampling.max_new_tokens - self.length

    @property
    def all_spans(self) -> tuple[Span, ...]:
        """Spans of the response so far."""
        return replace_spans(self.prefix_spans, tuple(self.spans))

    def awaits_environment(self, decode: Decode = None) -> bool:
        """Whether its environment acts next: before the model's first turn, and after each turn of the model."""
        if self.assignment.problem is None:
            return False
        if not self.length:
            return True
        if self.all_spans[-1].version is None:
            return False
        turn, stops = self.response_ids[self._answer.end :], self._answer.stop
        has_ended = self._is_full or int(turn[-1]) in self.assignment.sampling.stop_ids
        return has_ended or has_stop(turn, stops, decode)

    def turn_ended(self, reason: FinishReason) -> bool:
        """Whether a stream that ended for `reason` ended a turn for its environment, and not the response."""
        if self.assignment.problem is None:
            return False
        return reason is FinishReason.STOP or (reason is FinishReason.LENGTH and self._is_full)

    @property
    def _is_full(self) -> bool:
        """Whether the current turn has reached its environment's limit, and the response has room for more."""
        end = self._turn_end
        return end is not None and self.length >= end and self.room > 0

    @property
    def _turn_end(self) -> int | None:
        """Response length at which the environment's limit cuts the current turn; None without a limit."""
        answer = self._answer
        return None if answer.turn_limit is None else answer.end + answer.turn_limit

    @property
    def _answer(self) -> Span:
        """Span of its environment's last tokens, which the model's current turn follows; empty without any."""
        return last_answer(() if self.assignment.problem is None else self.all_spans)

    def model_turn(self) -> ModelTurn:
        """Return the request to its environment, with the log-probabilities of the model's last turn."""
        problem = self.assignment.problem
        assert problem is not None, f"{self.assignment.trajectory_id} has no environment"
        return ModelTurn(
            trajectory_id=self.assignment.trajectory_id,
            problem=problem,
            response_ids=self.response_ids,
            spans=self.all_spans,
            logprobs=_last(self.logprobs, self.length - self._answer.end, self.prefix_logprobs),
        )

    @property
    def reported(self) -> int:
        """Response tokens that were reported, here or by earlier replicas."""
        return self.length - sum(map(len, self.ids))

    def pop_unjournaled(self, now: float) -> Piece | None:
        """Return the tokens that the journal lacks, and count them as journaled; None if it lacks none."""
        if self.journaled == len(self.ids):
            return None
        piece = self._piece(self.journaled, now)
        self.journaled = len(self.ids)
        return piece

    def unreported(self, now: float) -> Piece | None:
        """Return all unreported tokens, None if there are none; `pop_progress` makes them count as reported."""
        if not self.ids and not self.experts and self.reward is None:
            return None
        return self._piece(0, now, experts=pack_experts(join_experts(self.experts)) if self.experts else None)

    def _piece(self, first: int, now: float, *, experts: bytes | None = None) -> Piece:
        """Return a piece with the unreported tokens, without the first `first` deltas."""
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

    def pop_progress(
        self,
        tokens: TokensRef | None,
        reason: FinishReason | None,
        now: float,
        *,
        broken: InterruptReason | None = None,
        failure: DropReason | None = None,
        detail: str = "",
    ) -> Progress:
        """Return the progress since the last report, after which its tokens count as reported.

        `tokens` is where the `unreported` piece is stored, None if there was none. `reason` is set if the response
        has finished; `broken`, `failure` and `detail` are as in `Progress`.
        """
        start = self.reported
        if tokens is not None:
            if reason is None:  # a finished response needs no prefix, since no request continues it
                self.prefix = np.concatenate([_NO_IDS if self.prefix is None else self.prefix, *self.ids])
                self.prefix_spans = self.all_spans
                if self.assignment.problem is not None:
                    self.prefix_logprobs = np.concatenate([self.prefix_logprobs, *self.logprobs])
            self.ids, self.logprobs, self.masks, self.experts, self.journaled = [], [], [], [], 0
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


def begin(assignment: Assignment, now: float) -> RunningTrajectory:
    """Return an assignment as a trajectory that starts now; a response so far must still be read from storage."""
    length = assignment.length
    return RunningTrajectory(
        assignment=assignment,
        submitted_s=now,
        prefix=None if length else _NO_IDS,
        earlier=None if assignment.earlier else (),
        length=length,
        stream=length,
        routed=assignment.routed,
    )


def handed_back(assignment: Assignment, *, lost: str = "") -> Progress:
    """Return the progress of an assignment that never started here; `lost` names its lost tokens, if any."""
    return Progress(
        trajectory_id=assignment.trajectory_id,
        epoch=assignment.epoch,
        start=assignment.length,
        finish_reason=None if lost else FinishReason.ABORT,
        lost=bool(lost),
        detail=lost,
    )


def _joined(masks: Sequence[SamplingMask | None]) -> SamplingMask | None:
    """Join the masks of deltas; None if none are recorded, or the whole vocabulary was open to each token."""
    recorded = [mask for mask in masks if mask is not None]
    return join_masks(recorded) if any(mask.counts.any() for mask in recorded) else None


def _last(arrays: Sequence[Array], count: int, prefix: Array) -> Array:
    """Return the last `count` values of `prefix` followed by `arrays`, joining only the arrays that it needs."""
    found: int = 0
    place: int = len(arrays)
    while found < count and place:
        place -= 1
        found += len(arrays[place])
    joined = np.concatenate([prefix[len(prefix) - max(0, count - found) :], *arrays[place:]])
    return joined[len(joined) - count :]
