"""Text of others, as it is shown."""

import pytest

from laminar_py.records.host import counted, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b]0;x\x07\u202eb\n", "a\\x1b]0;x\\x07\\u202eb\\n"),
        ("\x00\x9b2J\r\ud800\u2066", "\\x00\\x9b2J\\r\\ud800\\u2066"),
        ("[red]<script> 日本 é 😀\\n", "[red]<script> 日本 é 😀\\n"),
    ],
)
def test_control_characters_are_seen_and_not_obeyed(text, shown):
    assert visible(text) == shown
    assert visible(shown) == shown


def test_what_is_to_be_kept_stays():
    assert visible("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"


def test_a_count_and_its_noun_agree():
    numbers = [(0, "replica"), (1, "replica"), (2, "replica"), (1, "trajectory"), (1024, "trajectory")]
    shown = [counted(number, noun) for number, noun in numbers]
    assert shown == ["0 replicas", "1 replica", "2 replicas", "1 trajectory", "1,024 trajectories"]
