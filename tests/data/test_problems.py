"""Problems of a source: found by id and by prompt, in little more memory than their rows."""

import json
import tracemalloc
from pathlib import Path

import pytest

from laminar_py.config.section import ConfigError
from laminar_py.data.problems import BATCH, check_disjoint
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
