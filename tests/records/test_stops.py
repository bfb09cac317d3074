"""Stop strings in the tokens of a turn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.stops import has_stop, text_before_stop, tokens_to_stop

NONE = np.empty(0, np.int32)


def decode(ids):
    """Text of byte tokens; a token of 0 has no text."""
    return bytes(id for id in ids.tolist() if id).decode(errors="replace")


def ids_of(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def last_of(turn):
    """The last n tokens of a turn, as a replica gives them."""
    return lambda n: turn[-n:]


def test_a_turn_ends_with_the_token_that_completes_a_stop_string():
    turn = ids_of("Act: é\nObservation: 5 Stop")
    end = len(ids_of("Act: é\nObservation:"))
    assert tokens_to_stop(last_of(NONE), turn, ("Stop", "Observation:"), decode) == end
    assert tokens_to_stop(last_of(turn[:12]), turn[12:], ("Stop", "Observation:"), decode) == end - 12
    assert tokens_to_stop(last_of(NONE), turn, ("é",), decode) == len(ids_of("Act: é")), (
        "with the last byte of a character"
    )
    assert tokens_to_stop(last_of(NONE), turn, ("no",), decode) is None
    assert tokens_to_stop(last_of(NONE), turn, (), decode) is None


def test_tokens_without_text_within_a_stop_string_do_not_hide_it():
    before = np.concatenate([ids_of("long ago. Obser"), np.zeros(50, np.int32)])
    assert tokens_to_stop(last_of(before), ids_of("vation: 5"), ("Observation:",), decode) == 7


@given(
    st.lists(st.sampled_from("ab\0é"), max_size=30), st.integers(0, 30), st.sampled_from([("ab",), ("ba", "éé")])
)
def test_however_a_turn_arrives_it_ends_at_the_same_token(letters, first, stops):
    turn = ids_of("".join(letters))
    ends = [n for n in range(1, len(turn) + 1) if text_before_stop(decode(turn[:n]), stops)[1]]
    before, new = turn[:first], turn[first:]
    if not ends or first < ends[0]:
        found = tokens_to_stop(last_of(before), new, stops, decode)
        assert found == (ends[0] - len(before) if ends else None)


@pytest.mark.parametrize(("text", "before"), [("a Stop b Halt", "a "), ("a Halt Stop", "a "), ("Stop", "")])
def test_a_text_ends_before_its_first_stop_string(text, before):
    assert text_before_stop(text, ("Stop", "Halt")) == (before, True)
    assert has_stop(ids_of(text), ("Stop", "Halt"), decode)
    assert not has_stop(ids_of(text), (), None)
    assert text_before_stop(text, ("none",)) == text_before_stop(text, ()) == (text, False)
