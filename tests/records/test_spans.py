"""Spans against what they mean: a version and a KV version for each token."""

from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.codec import decode, encode
from laminar_py.records.spans import (
    Span,
    clip_spans,
    covers,
    decode_spans,
    encode_spans,
    merge_spans,
    replace_spans,
    shift_spans,
    versions_of,
)


def test_the_limit_of_a_turn_stays_with_the_words_that_set_it():
    words, turn = Span(None, 0, 4, turn_limit=2), Span(7, 4, 6)
    assert clip_spans((words, turn), 2) == (Span(None, 2, 4, turn_limit=2), turn)
    assert merge_spans((*clip_spans((words,), 0, 2), *clip_spans((words,), 2))) == (words,)
    assert replace_spans((words, turn), (Span(8, 5, 6),)) == (words, Span(7, 4, 5), Span(8, 5, 6))
    assert shift_spans((words,), 3) == (Span(None, 3, 7, turn_limit=2),)
    others = (Span(None, 0, 2), Span(None, 2, 4, turn_limit=2))
    assert merge_spans(others) == others, "they say other things"


def test_a_span_that_limits_no_turn_is_written_as_it_always_was():
    spans = (Span(None, 0, 4, turn_limit=2), Span(7, 4, 6))
    assert encode_spans(spans) == "[[null,0,4,null,null,2],[7,4,6,null,null]]"
    assert decode_spans(encode_spans(spans)) == spans
    assert decode(tuple[Span, ...], encode(spans)) == spans


LABELS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, 0])), max_size=12)


def spans_of(labels, start=0):
    """One span for each token."""
    return tuple(Span(version, i, i + 1, kv) for i, (version, kv) in enumerate(labels, start))


def labels_of(spans):
    return {i: (span.version, span.kv_version) for span in spans for i in range(span.start, span.end)}


def is_merged(spans):
    return spans == merge_spans(spans)


@given(LABELS, st.integers(0, 12), st.integers(0, 12))
def test_clipping_keeps_what_is_said_of_the_tokens_within(labels, start, end):
    clipped = clip_spans(spans_of(labels), start, end)
    assert labels_of(clipped) == {i: label for i, label in enumerate(labels) if start <= i < end}
    assert is_merged(clipped)


@given(LABELS, LABELS, st.integers(0, 12))
def test_replacing_changes_what_is_said_of_those_tokens_alone(labels, others, start):
    by = spans_of(others, start)
    replaced = replace_spans(spans_of(labels), by)
    assert labels_of(replaced) == labels_of(spans_of(labels)) | labels_of(by)
    assert is_merged(replaced)


@given(LABELS, st.integers(0, 9))
def test_merged_and_shifted_spans_cover_what_they_covered(labels, by):
    spans = merge_spans(spans_of(labels))
    assert covers(spans, 0, len(labels))
    assert covers(shift_spans(spans, by), by, by + len(labels))
    assert not covers(spans, 0, len(labels) + 1)
    assert decode_spans(encode_spans(spans)) == spans


def test_weights_behind_the_kv_cache_count_as_versions():
    assert versions_of((Span(7, 0, 3), Span(9, 3, 4, 8))) == {7, 8, 9}
