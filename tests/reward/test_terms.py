"""Terms of a reward: those that look at text, functions of the user's own, and how a config names them."""

from pathlib import Path

import msgspec
import pytest

from laminar_contrib.text_terms import ExactTerm, FormatTerm, LengthTerm, make_exact, make_format, make_length
from laminar_py.config.reward import FunctionTerm, RewardConfig, check_tasks
from laminar_py.config.section import ConfigError
from laminar_py.records.trajectory import FinishReason
from laminar_py.reward.terms import load_function
from tests.reward.requests import make_request


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
    assert make_exact(ExactTerm(pattern=pattern))(make_request(response)).value == value


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ABORT])
def test_exact_gives_nothing_for_a_response_that_was_cut(finish: FinishReason) -> None:
    assert make_exact(ExactTerm(pattern=r"#(\d)"))(make_request("#7", finish_reason=finish)).value == 0.0


def test_format_looks_over_line_breaks() -> None:
    reward = make_format(FormatTerm(pattern="^<think>.*</think>"))
    assert [reward(make_request(text)) for text in ("<think>a\nb</think>7", "7")] == [1.0, 0.0]


def test_length_takes_off_between_two_lengths_and_no_more() -> None:
    reward = make_length(LengthTerm(free=10, most=20))
    assert [reward(make_request("", num_tokens=count)) for count in (1, 10, 15, 20, 99)] == [0, 0, -0.5, -1, -1]


@pytest.mark.parametrize(
    ("term", "fault"),
    [
        ({"kind": "exact", "pattern": "("}, "pattern='(': not a regular expression"),
        ({"kind": "exact", "pattern": "#7"}, "pattern='#7': has no group"),
        ({"kind": "format", "pattern": "("}, "pattern='(': not a regular expression"),
        ({"kind": "length", "free": 5, "most": 5}, "free=5: not below most=5"),
        ("exakt", "reward.use.kind=exakt: unknown; choose one of environment, function, code"),
    ],
)
def test_a_term_that_cannot_be_is_explained(term: object, fault: str) -> None:
    with pytest.raises(ValueError, match=r".*") as caught:
        RewardConfig.model_validate_json(json_of(use=[term]))
    assert fault in str(caught.value)


def json_of(**settings: object) -> str:
    return msgspec.json.encode(settings).decode()


def test_terms_are_named_by_kind_by_path_or_by_their_name() -> None:
    given = ["mine.py:score", {"kind": "exact", "pattern": "(.)"}, {"kind": "length", "most": 9, "name": "short"}]
    reward = RewardConfig.model_validate_json(json_of(use=given))
    assert [term.title for term in reward.terms] == ["mine.py:score", "exact", "short"]
    assert RewardConfig.model_validate_json(reward.model_dump_json()) == reward


def test_a_share_of_tests_is_no_verdict() -> None:
    """Also in a run's config.yaml, which has every field."""
    for partial in (False, True):
        term = {"kind": "code", "partial": partial}
        reward = RewardConfig.model_validate_json(json_of(use=[term, "math"]))
        for config in (reward, RewardConfig.model_validate_json(reward.model_dump_json())):
            assert config.verdicts == (("math",) if partial else ("code", "math"))


def test_two_terms_of_one_name_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"reward.by_task.code: two terms have the name m.py:f; give each its own `name`"
    ):
        RewardConfig.model_validate_json(json_of(by_task={"code": ["m.py:f", "m.py:f"]}))


def test_every_task_has_a_reward_and_every_reward_a_task() -> None:
    reward = RewardConfig.model_validate_json(json_of(by_task={"code": ["m.py:f"]}))
    check_tasks(reward, {"code": "train.jsonl:1"})
    with pytest.raises(ConfigError, match=r"^train.jsonl:2: task 'math' has no reward; add it to reward.by_task"):
        check_tasks(reward, {"code": "train.jsonl:1", "math": "train.jsonl:2"})
    with pytest.raises(ConfigError, match=r"^reward.by_task.code: no problem has this task; .* math$"):
        check_tasks(reward, {"math": "train.jsonl:2", "": "train.jsonl:3"})


def test_a_function_in_a_file_of_the_user_is_a_reward(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Length:\n    tokens: int\n"
        "def half(request):\n    return Length(len(request.response)).tokens / 2\n"
    )
    assert load_function(FunctionTerm(path=f"{path}:half"))(make_request("abc")) == 1.5


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("half", "names no function; write path/to/file.py:function"),
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
def test_a_function_that_cannot_be_had_is_explained_in_one_line(tmp_path: Path, function: str, fault: str) -> None:
    for name, text in (
        ("mine.py", "NUMBER = 1\n"),
        ("mine.txt", ""),
        ("broken.py", "def half(request): ...\n1 / 0\n"),
        ("leaves.py", "def half(request): ...\nraise SystemExit(3)\n"),
        ("mangled.py", "("),
    ):
        (tmp_path / name).write_text(text)
    function = function.format(tmp=tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_function(FunctionTerm(path=function))
    assert str(caught.value).startswith(f"reward.use={function}: {fault.format(tmp=tmp_path)}")
    assert "\n" not in str(caught.value)
