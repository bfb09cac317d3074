"""Spans against what they mean: a version and a KV version for each token."""

from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.codec import decode, encode
from laminar_py.records.spans import (
    NEW_CONVERSATION,
    Span,
    TokenPath,
    clip_spans,
    context_of,
    context_tokens,
    covers,
    decode_spans,
    encode_spans,
    is_tree,
    merge_spans,
    replace_spans,
    sequences_of,
    shift_spans,
    turn_ends,
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


SPANS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([None, 3]), st.booleans(), st.integers()), max_size=9
)


def tree_of(drawn):
    """Spans of these lengths; some go back to a place before them."""
    spans, end = [], 0
    for length, version, goes_back, place in drawn:
        follows = None if not (goes_back and end) else place % (end + 1) - 1
        spans.append(Span(version, end, end + length, follows=follows))
        end += length
    return tuple(spans)


def contexts_of(spans):
    """Tokens before each one, by the meaning of `follows`, and whether the prompt is before them."""
    found = {}
    for span in spans:
        for place in range(span.start, span.end):
            before = place
            if place == span.start and span.follows is not None:
                before = span.follows
            if before <= 0:
                found[place] = (before == 0, [])
            else:
                has_prompt, behind = found[before - 1]
                found[place] = (has_prompt, [*behind, before - 1])
    return found


@given(SPANS)
def test_each_token_is_own_in_one_sequence_and_there_behind_all_that_it_was_sampled_behind(drawn):
    spans = tree_of(drawn)
    contexts, own = contexts_of(spans), []
    for path in sequences_of(spans):
        places = path.places.tolist()
        for index, (place, is_own) in enumerate(zip(places, path.own.tolist(), strict=True)):
            assert contexts[place] == (path.has_prompt, places[:index])
            own += [place] if is_own else []
    assert sorted(own) == list(range(spans[-1].end if spans else 0))


@given(SPANS)
def test_the_context_of_what_comes_next_is_that_of_the_last_token_and_itself(drawn):
    spans = tree_of(drawn)
    path = context_of(spans)
    places = path.places.tolist() if path.parts else []
    if spans:
        last = spans[-1].end - 1
        assert (path.has_prompt, places[:-1], places[-1]) == (*contexts_of(spans)[last], last)
    assert context_tokens(7, spans) == len(places) + 7 * path.has_prompt


def test_a_response_that_only_goes_on_is_one_sequence():
    spans = (Span(3, 0, 4), Span(None, 4, 6), Span(3, 6, 9))
    assert not is_tree(spans)
    assert sequences_of(spans) == [TokenPath(has_prompt=True, parts=((0, 9, True),))]
    assert turn_ends(spans) == [4, 9]


def test_a_conversation_that_begins_anew_has_neither_prompt_nor_what_was_said():
    spans = (Span(3, 0, 4), Span(None, 4, 9, follows=NEW_CONVERSATION), Span(3, 9, 12))
    first, second = sequences_of(spans)
    assert first == TokenPath(has_prompt=True, parts=((0, 4, True),))
    assert second == TokenPath(has_prompt=False, parts=((4, 12, True),))
    assert turn_ends(spans) == [4, 12]


def test_turns_end_in_the_order_in_which_they_were_taken_also_those_that_are_out_of_sight():
    spans = (Span(3, 0, 4), Span(None, 4, 6), Span(3, 6, 9), Span(None, 9, 11, follows=4), Span(3, 11, 15))
    assert turn_ends(spans) == [4, 9, 15]
    lengths = [path.length for path in sequences_of(spans)]
    assert lengths == [9, 10]
