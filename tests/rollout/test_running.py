"""One trajectory on a replica: what is reported of its streams."""

import msgspec
import numpy as np
import pytest

from laminar_py.records.engine import Delta, SamplingParams
from laminar_py.records.environment import Problem
from laminar_py.records.pieces import TokensRef, unpack_experts
from laminar_py.records.spans import Span, clip_spans
from laminar_py.records.trajectory import FinishReason
from laminar_py.rollout.running import begin
from tests.builders import make_experts, make_mask, make_ref
from tests.events import make_assignment

NO_IDS, NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def running(*, prefix=0, routed=0):
    """A trajectory that came with so many tokens, which have been read."""
    prompt = np.array([3, 4, 5], np.int32)
    item = begin(
        make_assignment(
            "a",
            group_id="g",
            prompt_ids=prompt,
            tokens=(TokensRef(0, prefix, make_ref(), routed),) if prefix else (),
            sampling=SamplingParams(max_new_tokens=9),
        ),
        0.0,
    )
    item.prefix = np.arange(prefix, dtype=np.int32)
    return item


@pytest.mark.parametrize("problem", [None, Problem(prompt="?")])
def test_the_engine_is_told_whether_more_turns_may_follow(problem):
    item = running()
    item.assignment = msgspec.structs.replace(item.assignment, problem=problem)
    assert item.request().has_turns is (problem is not None)


def tell(item, reason=None):
    """The piece that is stored of what was not told yet, and the report of it."""
    piece = item.unreported(2.0)
    tokens = None if piece is None else TokensRef(piece.start, piece.end, make_ref())
    return piece, item.pop_progress(tokens, reason, 2.0)


def take(item, *versions, **last):
    """One token under each version or (version, KV version), and then the engine's last word, if there is one."""
    for version in versions:
        said, kv_version = version if isinstance(version, tuple) else (version, None)
        item.append_delta(
            Delta(
                rid="a",
                ids=np.array([7], np.int32),
                logprobs=np.zeros(1, np.float32),
                version=said,
                kv_version=kv_version,
            ),
            1.0,
        )
    if last:
        item.append_delta(
            Delta(rid="a", ids=NO_IDS, logprobs=NO_LOGPROBS, version=0, finish_reason=FinishReason.ABORT, **last),
            1.0,
        )


def test_neighbours_are_one_span_if_version_and_kv_version_agree():
    item = running(prefix=2)
    take(item, 4, 4, (5, 4), (5, 4), 5)
    spans = (Span(4, 2, 4), Span(5, 4, 6, 4), Span(5, 6, 7))
    piece, progress = tell(item)
    assert piece.spans == progress.spans == spans


def test_the_last_word_reaches_back_to_the_beginning_of_its_stream_and_no_further():
    item = running(prefix=2)
    item.request()
    take(item, 4, 4, spans=(Span(4, 0, 2),))
    tell(item)
    item.request()
    take(item, 5, 5)
    assert tell(item)[1].spans == (Span(5, 4, 6),)
    take(item, 6, spans=(Span(5, 0, 1), Span(6, 1, 3, 5)))
    piece, progress = tell(item, FinishReason.ABORT)
    assert (progress.start, progress.end, piece.start, piece.end) == (6, 7, 6, 7)
    assert piece.spans == progress.spans == (Span(5, 4, 5), Span(6, 5, 7, 5))


def test_each_stream_asks_for_experts_from_where_the_one_before_ended():
    item = running(prefix=2, routed=3)
    assert item.request().routed == 3
    take(item, 4, 4, routed_experts=make_experts(3, 6))
    piece, _ = tell(item)
    assert unpack_experts(piece.experts) == make_experts(3, 6)
    request = item.request()
    assert (request.routed, len(request.prefix_ids)) == (6, 4)
    assert item.unreported(2.0) is None, "stored once"


def test_a_stream_that_goes_on_before_a_report_continues_from_every_token():
    item = running(prefix=1)
    take(item, 4, 4)
    assert item.request().prefix_ids.tolist() == [0, 7, 7]
    take(item, 5, spans=(Span(6, 0, 1),))
    piece, progress = tell(item)
    assert progress.spans == (Span(4, 1, 3), Span(6, 3, 4))
    assert (progress.start, np.frombuffer(piece.ids, np.int32).tolist()) == (1, [7, 7, 7])


def test_what_does_not_fit_the_stream_is_refused_by_name():
    for last in ({"spans": (Span(4, 0, 2),)}, {"routed_experts": make_experts(1, 4)}):
        with pytest.raises(AssertionError, match="a: "):
            take(running(), 4, **last)
    item = running()
    take(item, 4)
    ids = np.array([7, 8], np.int32)
    item.append_delta(
        Delta(rid="a", ids=ids, logprobs=np.zeros(2, np.float32), version=4, sampling_mask=make_mask(ids)), 1.0
    )
    with pytest.raises(AssertionError, match="a: 3 tokens with 2 sampling masks"):
        item.unreported(2.0)


def test_what_is_noted_and_what_is_told_are_all_that_the_engine_gave_each_once():
    item = running(prefix=2)
    take(item, 4, 4)
    first = item.pop_unjournaled(1.0)
    take(item, 5)
    second = item.pop_unjournaled(1.0)
    assert [(piece.start, piece.end) for piece in (first, second)] == [(2, 4), (4, 5)]
    assert (first.spans, second.spans) == ((Span(4, 2, 4),), (Span(5, 4, 5),))
    assert item.pop_unjournaled(1.0) is None, "noted once"
    take(item, 5)
    piece, progress = tell(item)
    assert (piece.start, piece.end) == (2, 6), "to be told it need not have been noted, nor not"
    assert progress.spans == (Span(4, 2, 4), Span(5, 4, 6))
    assert item.pop_unjournaled(1.0) is None, "what was told need not be noted"
    take(item, 6)
    assert (item.pop_unjournaled(1.0).start, item.reported) == (6, 6)


WORDS = np.array([5, 6], np.int32)


def limited(*, length=30, most=4):
    """A trajectory whose environment has limited its first turn, which is at hand."""
    item = running()
    sampling = SamplingParams(max_new_tokens=length, stop_ids=(1,))
    item.assignment = msgspec.structs.replace(item.assignment, problem=Problem(prompt="?"), sampling=sampling)
    item.append_observation(WORDS, max_tokens=most)
    return item


def test_a_limited_turn_ends_where_its_environment_says_however_often_it_is_interrupted():
    item = limited()
    assert item.request().sampling.max_new_tokens == 6
    take(item, 4, 4)
    tell(item)
    assert not item.awaits_environment()
    assert item.request().sampling.max_new_tokens == 6, "it goes on, with what is left of its limit"
    take(item, 5, 5)
    assert item.awaits_environment()
    assert item.turn_ended(FinishReason.LENGTH)
    assert item.all_spans[0] == Span(None, 0, 2, turn_limit=4)
    item.append_observation(WORDS)
    assert item.request().sampling.max_new_tokens == 30, "the next turn has no limit"
    assert not item.turn_ended(FinishReason.LENGTH)


def test_one_that_comes_from_elsewhere_has_the_limit_that_its_spans_have():
    there = limited()
    take(there, 4, 4, 4, 4)
    here = begin(msgspec.structs.replace(there.assignment, tokens=(TokensRef(0, 6, make_ref()),)), 0.0)
    here.prefix, here.prefix_spans = there.response_ids, there.all_spans
    assert here.awaits_environment()
    here = begin(msgspec.structs.replace(there.assignment, tokens=(TokensRef(0, 5, make_ref()),)), 0.0)
    here.prefix, here.prefix_spans = there.response_ids[:5], clip_spans(there.all_spans, 0, 5)
    assert not here.awaits_environment()
    assert here.request().sampling.max_new_tokens == 6


@pytest.mark.parametrize("most", [4, 5])
def test_a_limit_that_the_response_has_no_room_for_is_none(most):
    item = limited(length=6, most=most)
    assert item.request().sampling.max_new_tokens == 6
    take(item, 4, 4, 4, 4)
    assert not item.turn_ended(FinishReason.LENGTH), "the response is full"
    assert not item.awaits_environment()


def test_a_limited_turn_of_a_branch_has_its_limit_behind_its_own_context():
    item = limited()
    take(item, 4, 4)
    item.append_observation(WORDS, follows=2, max_tokens=3)
    request = item.request()
    assert len(request.prefix_ids) == 4, "what the branch follows, and its words"
    assert request.sampling.max_new_tokens == 4 + 3


def test_a_stop_string_cuts_all_that_a_delta_says_of_later_tokens():
    item = limited(most=None)
    item.append_observation(WORDS, stop=("7",))
    item.request()
    last = Delta(
        rid="a",
        ids=np.array([5, 7, 8, 7], np.int32),
        logprobs=np.arange(4, dtype=np.float32),
        version=1,
        finish_reason=FinishReason.ABORT,
        spans=(Span(0, 0, 1), Span(1, 1, 4)),
        sampling_mask=make_mask(np.array([5, 7, 8, 7])),
        routed_experts=make_experts(0, 3 + 2 * len(WORDS) + 3),
    )
    cut = item.cut_at_stop(last, lambda ids: "".join(map(str, ids.tolist())))
    assert (cut.ids.tolist(), cut.logprobs.tolist()) == ([5, 7], [0.0, 1.0])
    assert cut.spans == (Span(0, 0, 1), Span(1, 1, 2))
    assert cut.finish_reason is FinishReason.STOP
    assert cut.sampling_mask.counts.tolist() == last.sampling_mask.counts[:2].tolist()
    assert len(cut.sampling_mask.ids) == cut.sampling_mask.counts.sum()
    assert cut.routed_experts.positions == 3 + 2 * len(WORDS) + 1
    item.append_delta(cut, 1.0)
    assert item.turn_ended(cut.finish_reason)
    assert len(item.cut_at_stop(last, None).ids) == 0, "later tokens of the stream are discarded"


def test_stop_strings_cost_no_more_for_each_token_of_a_long_turn():
    item, read = limited(length=100_000, most=None), []

    def decode(ids):
        read.append(len(ids))
        return "".join(map(chr, ids.tolist()))

    item.append_observation(WORDS, stop=("ab",))
    item.request()
    for token in [*[120] * 1000, 97, 98]:
        ids = np.array([token], np.int32)
        item.append_delta(item.cut_at_stop(Delta(rid="a", ids=ids, logprobs=np.zeros(1), version=1), decode), 1.0)
    assert item.has_stopped
    assert sum(read) < 50 * 1000
    assert len(item._last_of_turn(5000)) == 1002
    read.clear()
    assert item.awaits_environment(decode)
    assert sum(read) == 1002, "the whole turn once, and not once for each of its tokens"


def test_a_stop_string_is_found_across_a_report_and_not_across_the_last_answer():
    item = limited(most=None)
    item.append_observation(WORDS, stop=("77",))
    item.request()
    take(item, 1)
    tell(item)
    one = Delta(rid="a", ids=np.array([7], np.int32), logprobs=np.zeros(1, np.float32), version=1)
    assert item.cut_at_stop(one, lambda ids: "".join(map(str, ids.tolist()))).ids.tolist() == [7]
    assert item.has_stopped
    item.append_delta(one, 1.0)
    item.append_observation(WORDS, stop=("77",))
    item.request()
    item.cut_at_stop(one, lambda ids: "".join(map(str, ids.tolist())))
    assert not item.has_stopped
