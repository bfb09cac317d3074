"""One trajectory on a replica: what is reported of its streams."""

import numpy as np
import pytest

from laminar_py.records.engine import Delta, SamplingParams
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import FinishReason, Kind, Span
from laminar_py.rollout.running import begin
from tests.builders import make_experts, make_mask

NO_IDS, NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def running(*, prefix=0, routed=0):
    ids = np.arange(prefix, dtype=np.int32)
    prompt = np.array([3, 4, 5], np.int32)
    return begin(
        Assignment(
            trajectory_id="a",
            epoch=1,
            group_id="g",
            kind=Kind.TRAIN,
            prompt_ids=prompt,
            prefix_ids=ids,
            sampling=SamplingParams(max_new_tokens=9),
            routed=routed,
        ),
        0.0,
    )


def take(item, *versions, **last):
    """One token under each version or (version, KV version), and then the engine's last word, if there is one."""
    for version in versions:
        said, kv_version = version if isinstance(version, tuple) else (version, None)
        item.take(
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
        item.take(
            Delta(rid="a", ids=NO_IDS, logprobs=NO_LOGPROBS, version=0, finish_reason=FinishReason.ABORT, **last),
            1.0,
        )


def test_neighbours_are_one_span_if_version_and_kv_version_agree():
    item = running(prefix=2)
    take(item, 4, 4, (5, 4), (5, 4), 5)
    spans = (Span(4, 2, 4), Span(5, 4, 6, 4), Span(5, 6, 7))
    assert item.progress(None, 2.0).spans == spans


def test_the_last_word_reaches_back_to_the_beginning_of_its_stream_and_no_further():
    item = running(prefix=2)
    item.request()
    take(item, 4, 4, spans=(Span(4, 0, 2),))
    item.progress(None, 2.0)
    item.request()
    take(item, 5, 5)
    assert item.progress(None, 2.0).spans == (Span(5, 4, 6),)
    take(item, 6, spans=(Span(5, 0, 1), Span(6, 1, 3, 5)))
    progress = item.progress(FinishReason.ABORT, 2.0)
    assert (progress.start, len(progress.ids)) == (6, 1)
    assert progress.spans == (Span(5, 4, 5), Span(6, 5, 7, 5))


def test_each_stream_asks_for_experts_from_where_the_one_before_ended():
    item = running(prefix=2, routed=3)
    assert item.request().routed == 3
    take(item, 4, 4, routed_experts=make_experts(3, 6))
    progress = item.progress(None, 2.0)
    assert progress.routed_experts == make_experts(3, 6)
    request = item.request()
    assert (request.routed, len(request.prefix_ids)) == (6, 4)
    assert item.progress(None, 2.0).routed_experts is None, "reported once"


def test_a_stream_that_goes_on_before_a_report_continues_from_every_token():
    item = running(prefix=1)
    take(item, 4, 4)
    assert item.request().prefix_ids.tolist() == [0, 7, 7]
    take(item, 5, spans=(Span(6, 0, 1),))
    progress = item.progress(None, 2.0)
    assert progress.spans == (Span(4, 1, 3), Span(6, 3, 4))
    assert (progress.start, progress.ids.tolist()) == (1, [7, 7, 7])


def test_what_does_not_fit_the_stream_is_refused_by_name():
    for last in ({"spans": (Span(4, 0, 2),)}, {"routed_experts": make_experts(1, 4)}):
        with pytest.raises(AssertionError, match="a: "):
            take(running(), 4, **last)
    item = running()
    take(item, 4)
    ids = np.array([7, 8], np.int32)
    item.take(
        Delta(rid="a", ids=ids, logprobs=np.zeros(2, np.float32), version=4, sampling_mask=make_mask(ids)), 1.0
    )
    with pytest.raises(AssertionError, match="a: 3 tokens with 2 sampling masks"):
        item.progress(None, 2.0)
