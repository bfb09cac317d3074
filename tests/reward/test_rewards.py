"""Rewards: `exact`, and how `reward.function` is found."""

from pathlib import Path

import numpy as np
import pytest

from laminar_py.config.section import ConfigError
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import FinishReason
from laminar_py.reward.registry import load_reward


def make_request(response: str, *, answer: str = "7", finish: FinishReason = FinishReason.STOP) -> ScoringRequest:
    return ScoringRequest(
        trajectory_id="g0.0",
        prompt="e-2;o*7;1x5?",
        response=response,
        answer=answer,
        finish_reason=finish,
        response_ids=np.array([1], dtype=np.int32),
    )


@pytest.mark.parametrize(
    ("pattern", "response", "value"),
    [
        (r"#(\d)$", "o*7=7x0;#7", 1.0),
        (r"#(\d)$", "o*7=7x0;#3", 0.0),
        (r"#(\d)$", "o*7=7x0;#7;", 0.0),
        (r"#(\d)$", "", 0.0),
        (r"#(\d)", "#3 or rather #7", 1.0),
        (r"#(\d)", "#7 or rather #3", 0.0),
        (r"#(\d)?", "#7 or rather #", 0.0),
    ],
)
def test_exact_compares_the_last_match_with_the_answer(pattern: str, response: str, value: float) -> None:
    assert load_reward("exact", pattern=pattern)(make_request(response)) == value


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ABORT])
def test_exact_gives_nothing_for_a_response_that_was_cut(finish: FinishReason) -> None:
    assert load_reward("exact", pattern=r"#(\d)")(make_request("#7", finish=finish)) == 0.0


@pytest.mark.parametrize(("pattern", "fault"), [("(", "not a regular expression"), ("#7", "has no group")])
def test_exact_refuses_a_pattern_it_cannot_use(pattern: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward\.pattern='.*': {fault}.*; "):
        load_reward("exact", pattern=pattern)


def test_a_function_in_a_file_of_the_user_is_a_reward(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Length:\n    tokens: int\n"
        "def half(request):\n    return Length(len(request.response)).tokens / 2\n"
    )
    assert load_reward(f"{path}:half", pattern="(.+)")(make_request("abc")) == 1.5


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("exakt", "unknown; choose exact or write "),
        ("nowhere.py:half", "no such file as nowhere.py; "),
        ("{tmp}/mine.py:whole", "{tmp}/mine.py defines no function 'whole'; "),
        ("{tmp}/mine.py:NUMBER", "{tmp}/mine.py defines no function 'NUMBER'; "),
        ("{tmp}/mine.py:", "{tmp}/mine.py defines no function ''; "),
        ("{tmp}/mine.txt:half", "{tmp}/mine.txt is no Python file; "),
        ("{tmp}/broken.py:half", "importing {tmp}/broken.py failed (ZeroDivisionError: division by zero); "),
        ("{tmp}/leaves.py:half", "importing {tmp}/leaves.py failed (SystemExit: 3); "),
        ("{tmp}/mangled.py:half", "importing {tmp}/mangled.py failed (SyntaxError: "),
    ],
)
def test_a_reward_that_cannot_be_had_is_explained_in_one_line(tmp_path: Path, function: str, fault: str) -> None:
    for name, text in (
        ("mine.py", "NUMBER = 1\n"),
        ("mine.txt", ""),
        ("broken.py", "1 / 0\n"),
        ("leaves.py", "raise SystemExit(3)\n"),
        ("mangled.py", "("),
    ):
        (tmp_path / name).write_text(text)
    function = function.format(tmp=tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_reward(function, pattern="(.+)")
    assert str(caught.value).startswith(f"reward.function={function}: {fault.format(tmp=tmp_path)}")
    assert "\n" not in str(caught.value)
