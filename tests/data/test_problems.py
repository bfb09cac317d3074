"""Problems of a source: found by id and by prompt, in little more memory than their rows."""

import json
import tracemalloc
from pathlib import Path

import pytest

from laminar_py.config.section import ConfigError
from laminar_py.data import problems as problems_module
from laminar_py.data.problems import BATCH, check_disjoint, missing_rows
from laminar_py.data.sources import source_at
from tests.data.builders import GOOD, make_problems, read, source, written

MANY = 2 * BATCH + 500


def test_problems_take_little_more_memory_than_their_rows(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "1+1=" * 50, "answer": "2", "note": "b" * 200})
    at = written(tmp_path / "t.jsonl", *[row] * 20_000)
    tracemalloc.start()
    problems = read(at, max_prompt_tokens=None)
    assert problems.find("p19999") == 19_999
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 1.2 * (tmp_path / "t.jsonl").stat().st_size + 60 * 20_000


def test_a_problem_is_found_by_its_id() -> None:
    problems = make_problems(100, prefix="train.0/")
    assert [problems.find(problems.id(place)) for place in range(100)] == list(range(100))
    assert [problems.find(id) for id in ("100", "train.0/100", "7", "train.1/7")] == [None] * 4


def test_faults_behind_the_first_batch_have_their_lines(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{row}+1="}}' for row in range(MANY)]
    with pytest.raises(ConfigError, match=rf"t\.jsonl:{MANY + 1}: prompt is empty"):
        read(written(tmp_path / "t.jsonl", *lines, '{"prompt": ""}'))
    with pytest.raises(ConfigError, match=rf"t\.jsonl:{MANY + 1}: id also in line 8 in 'p7'; give"):
        read(written(tmp_path / "t.jsonl", *lines, '{"prompt": "a", "id": "p7"}'))
    with pytest.raises(ConfigError, match=rf"t\.jsonl:{MANY + 1}: prompt has 9 tokens, above the 8"):
        read(written(tmp_path / "t.jsonl", *lines, '{"prompt": "123456789"}'), max_prompt_tokens=8)


def test_rows_that_reading_leaves_out_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [GOOD, "", '{"prompt": "2+2="}', "  ", '{"prompt": "3+3="}']
    assert missing_rows([read(written(tmp_path / "all.jsonl", *lines))]) == ""
    records = problems_module.read_records
    monkeypatch.setattr(problems_module, "read_records", lambda *given: iter(list(records(*given))[:2]))
    fault = missing_rows([read(written(tmp_path / "cut.jsonl", *lines))])
    assert "cut.jsonl: 2 of 3 rows were read" in fault


@pytest.mark.parametrize("other", ["1+1= a ", " 1+1=  a\\n", "1+1=\\u00a0a", "1+1=\\ta"])
def test_a_leak_is_one_whatever_its_white_space(tmp_path: Path, other: str) -> None:
    train = read(written(tmp_path / "train.jsonl", GOOD, '{"prompt": "1+1= a"}'))
    heldout = read(written(tmp_path / "h.jsonl", f'{{"prompt": "{other}"}}', field="eval.sets.h"))
    with pytest.raises(ConfigError, match=r"^eval\.sets\.h=.*h\.jsonl:1: prompt also in data\.train=.*:2 in "):
        check_disjoint(heldout, [train])


def test_powers_are_no_digits_and_composed_characters_are_those_they_are_composed_of(tmp_path: Path) -> None:
    train = read(written(tmp_path / "train.jsonl", '{"prompt": "3²+a"}', '{"prompt": "caf\\u00e9"}'))
    assert train.find_prompt("32+a") is None
    assert train.find_prompt("cafe\u0301") == 1


def test_a_digest_is_of_rows_and_where_they_stand(tmp_path: Path) -> None:
    other = '{"prompt": "a"}'
    files = [[GOOD, other], [GOOD, other], [other, GOOD], [GOOD, "", other], [GOOD, '{"prompt": "b"}']]
    digests = [read(written(tmp_path / f"{name}.jsonl", *lines)).digest for name, lines in enumerate(files)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    written(tmp_path / "c.jsonl", '{"question": "a", "prompt": "1+1=", "answer": "2"}')
    first, second = (read(source(tmp_path / "c.jsonl", columns=of)) for of in ({}, {"prompt": "question"}))
    assert first.digest != second.digest


def test_a_good_file_gives_one_prompt_per_line(tmp_path: Path) -> None:
    named = json.dumps({"prompt": "a", "answer": "b", "id": "mine", "source": "ignored"})
    first, second = read(written(tmp_path / "t.jsonl", GOOD, named))
    assert (first.id, first.index, first.text, first.answer) == ("p0", 0, "1+1=", "2")
    assert (second.id, second.index, second.text, second.answer) == ("mine", 1, "a", "b")
    assert first.ids.tolist() == [2, 11, 2, 12]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "1', "input data was truncated"),
        ('["1+1=", "2"]', "expected `object`, got `array`"),
        ('{"answer": "2"}', "missing required field `prompt`"),
        ('{"prompt": "1+1=", "answer": [2]}', "expected `int | float | str | null`, got `array` - at `$.answer`"),
        ('{"prompt": "", "answer": "2"}', "prompt is empty"),
        ('{"prompt": "a", "answer": "2", "id": "p0"}', "id also in line 1"),
        ('{"prompt": "123456789", "answer": "2"}', "prompt has 9 tokens, above the 8"),
    ],
)
def test_a_bad_line_is_named_with_field_place_value_and_remedy(tmp_path: Path, line: str, fault: str) -> None:
    source = written(tmp_path / "t.jsonl", GOOD, line, GOOD)
    with pytest.raises(ConfigError) as caught:
        read(source, max_prompt_tokens=8)
    message = str(caught.value)
    assert message.startswith(f"data.train={source.path}:2: ")
    assert fault in message
    assert "; " in message
    assert "\n" not in message


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: .*utf-8.*\\\\xff"):
        read(source_at(path, "eval.sets.heldout"))


def test_blank_lines_are_skipped_and_every_other_line_keeps_its_number(tmp_path: Path) -> None:
    source = written(tmp_path / "t.jsonl", "", GOOD, "  \t", '{"prompt": "a", "answer": "b"}', "")
    assert [(prompt.id, prompt.index) for prompt in read(source)] == [("p1", 1), ("p3", 3)]
    with pytest.raises(ConfigError, match=r"t\.jsonl:3: .*missing required field `prompt`"):
        read(written(tmp_path / "t.jsonl", GOOD, "", '{"answer": "a"}'))
    with pytest.raises(ConfigError, match=r"holds no lines"):
        read(written(tmp_path / "t.jsonl", "", " "))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval.sets.heldout=.*nowhere\.jsonl: no such file; "):
        read(source_at(tmp_path / "nowhere.jsonl", "eval.sets.heldout"))
    with pytest.raises(ConfigError, match=r"data.train=.*t\.jsonl: holds no lines; "):
        read(written(tmp_path / "t.jsonl"))


def test_a_heldout_prompt_that_is_trained_on_is_refused_with_both_lines(tmp_path: Path) -> None:
    other = '{"prompt": "a", "answer": "2"}'
    train = written(tmp_path / "train.jsonl", other, other, GOOD)
    heldout = written(
        tmp_path / "heldout.jsonl", '{"prompt": "b", "answer": "2"}', GOOD, field="eval.sets.heldout"
    )
    with pytest.raises(
        ConfigError, match=r"eval.sets.heldout=.*heldout\.jsonl:2: .* data.train=.*train\.jsonl:3 .*1\+1="
    ):
        check_disjoint(read(heldout), [read(train)])


def test_disjoint_files_pass(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", '{"prompt": "a", "answer": "2"}')
    heldout = written(tmp_path / "heldout.jsonl", GOOD, field="eval.sets.heldout")
    check_disjoint(read(heldout), [read(train)])


def test_a_prompt_may_say_which_task_it_is_of(tmp_path):
    source = written(tmp_path / "train.jsonl", '{"prompt": "1+1=", "answer": "2", "task": "sums"}', GOOD)
    assert [prompt.task for prompt in read(source)] == ["sums", ""]


def test_a_problem_keeps_all_fields_of_its_line_as_they_are_written(tmp_path: Path) -> None:
    line = '{"prompt": "ab", "task": "code", "tests": [{"in": 1.50, "x": "\\u00e9"}], "level": 3, "answer": "4"}'
    (prompt,) = read(written(tmp_path / "t.jsonl", line))
    assert prompt.fields_json == b'{"tests":[{"in": 1.50, "x": "\\u00e9"}],"level":3}'


def test_an_answer_or_id_that_is_a_number_stays_as_it_is_written(tmp_path: Path) -> None:
    (prompt,) = read(written(tmp_path / "t.jsonl", '{"prompt": "a", "answer": 1.50, "id": 7, "task": null}'))
    assert (prompt.id, prompt.answer, prompt.task) == ("7", "1.50", "")


def test_a_source_may_name_its_task_and_ids_may_have_a_prefix(tmp_path: Path) -> None:
    written(tmp_path / "t.jsonl", GOOD, '{"prompt": "a", "task": "own", "id": "x"}')
    prompts = read(source(tmp_path / "t.jsonl", task="sums"), prefix="train.1/")
    assert [(prompt.id, prompt.task) for prompt in prompts] == [("train.1/p0", "sums"), ("train.1/x", "sums")]
