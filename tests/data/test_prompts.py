"""Prompt files and the stream."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.section import ConfigError
from laminar_py.data.jsonl import JsonlFile
from laminar_py.data.prompts import PromptStream, check_disjoint, read_prompts
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.records.trajectory import Prompt

GOOD = '{"prompt": "1+1=", "answer": "2"}'


def character_tokenizer() -> Tokenizer:
    vocabulary = {character: index for index, character in enumerate("?0123456789+=abc")}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    return Tokenizer(backend, eos_ids=(99,))


def written(path: Path, *lines: str, field: str = "data.train") -> JsonlFile:
    path.write_text("".join(line + "\n" for line in lines))
    return JsonlFile(path, field)


def read(source: JsonlFile, *, max_prompt_tokens: int = 64) -> list[Prompt]:
    return read_prompts(source, tokenizer=character_tokenizer(), max_prompt_tokens=max_prompt_tokens)


def make_prompts(count: int) -> list[Prompt]:
    return [
        Prompt(id=f"p{row}", index=row, text=str(row), ids=np.array([row], dtype=np.int32)) for row in range(count)
    ]


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
        ('{"prompt": "1+1=", "answer": 2}', "expected `str`, got `int` - at `$.answer`"),
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
        read(JsonlFile(path, "data.heldout"))


def test_blank_lines_are_skipped_and_every_other_line_keeps_its_number(tmp_path: Path) -> None:
    source = written(tmp_path / "t.jsonl", "", GOOD, "  \t", '{"prompt": "a", "answer": "b"}', "")
    assert [(prompt.id, prompt.index) for prompt in read(source)] == [("p1", 1), ("p3", 3)]
    with pytest.raises(ConfigError, match=r"t\.jsonl:3: .*missing required field `prompt`"):
        read(written(tmp_path / "t.jsonl", GOOD, "", '{"answer": "a"}'))
    with pytest.raises(ConfigError, match=r"holds no lines"):
        read(written(tmp_path / "t.jsonl", "", " "))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.heldout=.*nowhere\.jsonl: no such file; "):
        read(JsonlFile(tmp_path / "nowhere.jsonl", "data.heldout"))
    with pytest.raises(ConfigError, match=r"data.train=.*t\.jsonl: holds no lines; "):
        read(written(tmp_path / "t.jsonl"))


def test_a_heldout_prompt_that_is_trained_on_is_refused_with_both_lines(tmp_path: Path) -> None:
    other = '{"prompt": "a", "answer": "2"}'
    train = written(tmp_path / "train.jsonl", other, other, GOOD)
    heldout = written(tmp_path / "heldout.jsonl", '{"prompt": "b", "answer": "2"}', GOOD, field="data.heldout")
    with pytest.raises(
        ConfigError, match=r"data.heldout=.*heldout\.jsonl:2: .* data.train=.*train\.jsonl:3 .*1\+1="
    ):
        check_disjoint(read(heldout), read(train), sources=(heldout, train))


def test_disjoint_files_pass(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", '{"prompt": "a", "answer": "2"}')
    heldout = written(tmp_path / "heldout.jsonl", GOOD, field="data.heldout")
    check_disjoint(read(heldout), read(train), sources=(heldout, train))


@given(count=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_every_epoch_holds_every_row_once(count: int, seed: int, epoch: int) -> None:
    stream = PromptStream(make_prompts(count), seed=seed)
    drawn = [stream.prompt(epoch * count + place) for place in range(count)]
    assert sorted(int(prompt.id[1:]) for prompt in drawn) == list(range(count))
    assert [prompt.index for prompt in drawn] == list(range(epoch * count, (epoch + 1) * count))


@given(order=st.permutations(range(30)), seed=st.integers(0, 1000))
def test_a_place_holds_the_same_prompt_in_whatever_order_it_is_asked_for(order: list[int], seed: int) -> None:
    prompts = make_prompts(3)  # 30 places are 10 epochs, more than the stream remembers
    forward, scattered = PromptStream(prompts, seed=seed), PromptStream(prompts, seed=seed)
    expected = [forward.prompt(index).id for index in range(30)]
    assert [scattered.prompt(index).id for index in order] == [expected[index] for index in order]


def test_epochs_and_seeds_differ() -> None:
    def ids(seed: int, epoch: int) -> list[str]:
        stream = PromptStream(make_prompts(50), seed=seed)
        return [stream.prompt(50 * epoch + place).id for place in range(50)]

    assert len({tuple(ids(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_prompt_may_say_which_task_it_is_of(tmp_path):
    source = written(tmp_path / "train.jsonl", '{"prompt": "1+1=", "answer": "2", "task": "sums"}', GOOD)
    assert [prompt.task for prompt in read(source)] == ["sums", ""]


def test_a_problem_keeps_all_fields_of_its_line_as_they_are_written(tmp_path: Path) -> None:
    line = '{"prompt": "ab", "task": "code", "tests": [{"in": 1.50, "x": "\\u00e9"}], "level": 3, "answer": "4"}'
    (prompt,) = read(written(tmp_path / "t.jsonl", line))
    assert prompt.fields_json == b'{"tests":[{"in": 1.50, "x": "\\u00e9"}],"level":3}'
