"""Trees of responses against what they mean: a context for each token."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.spans import (
    ANEW,
    Span,
    TokenPath,
    context_of,
    context_tokens,
    is_tree,
    packed_tokens,
    sequences_of,
    turn_ends,
)

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


@given(SPANS)
def test_packed_tokens_are_those_of_all_sequences(drawn):
    spans = tree_of(drawn)
    sequences = sequences_of(spans) or [TokenPath(has_prompt=True, parts=())]
    assert packed_tokens(5, spans) == sum(5 * path.has_prompt + path.length for path in sequences)


def test_a_response_that_only_goes_on_is_one_sequence():
    spans = (Span(3, 0, 4), Span(None, 4, 6), Span(3, 6, 9))
    assert not is_tree(spans)
    assert sequences_of(spans) == [TokenPath(has_prompt=True, parts=((0, 9, True),))]
    assert turn_ends(spans) == [4, 9]


def test_a_conversation_that_begins_anew_has_neither_prompt_nor_what_was_said():
    spans = (Span(3, 0, 4), Span(None, 4, 9, follows=ANEW), Span(3, 9, 12))
    first, second = sequences_of(spans)
    assert first == TokenPath(has_prompt=True, parts=((0, 4, True),))
    assert second == TokenPath(has_prompt=False, parts=((4, 12, True),))
    assert turn_ends(spans) == [4, 12]


def test_turns_end_in_the_order_in_which_they_were_taken_also_those_that_are_out_of_sight():
    spans = (Span(3, 0, 4), Span(None, 4, 6), Span(3, 6, 9), Span(None, 9, 11, follows=4), Span(3, 11, 15))
    assert turn_ends(spans) == [4, 9, 15]
    lengths = [path.length for path in sequences_of(spans)]
    assert lengths == [9, 10]
    assert list(itertools.accumulate(lengths))[-1] == packed_tokens(0, spans)
