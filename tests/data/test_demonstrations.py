"""Demonstrations of the warm start."""

from pathlib import Path

import pytest
import tokenizers

from laminar_py.config.section import ConfigError
from laminar_py.data.demonstrations import read_demonstrations
from laminar_py.data.jsonl import JsonlFile
from laminar_py.data.tokenizer import Tokenizer


def make_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    return Tokenizer(backend, eos_ids=(7, 8))


def written(path: Path, *lines: str) -> JsonlFile:
    path.write_text("".join(line + "\n" for line in lines))
    return JsonlFile(path, "warm_start.data")


def test_a_response_ends_in_the_first_eos_id(tmp_path: Path) -> None:
    source = written(tmp_path / "w.jsonl", '{"prompt": "ab", "response": "ba"}')
    (demonstration,) = read_demonstrations(source, tokenizer=make_tokenizer(), max_tokens=5)
    assert demonstration.prompt_ids.tolist() == [0, 1]
    assert demonstration.response_ids.tolist() == [1, 0, 7]


def test_a_prompt_begins_as_in_rl_and_its_response_does_not(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<s>": 2}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    source = written(tmp_path / "w.jsonl", '{"prompt": "ab", "response": "ba"}')
    (demonstration,) = read_demonstrations(source, tokenizer=Tokenizer(backend, eos_ids=(7,)), max_tokens=6)
    assert demonstration.prompt_ids.tolist() == [2, 0, 1]
    assert demonstration.response_ids.tolist() == [1, 0, 7]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "ab", "answer": "ba"}', "object missing required field `response`"),
        ('{"prompt": "", "response": "ba"}', "prompt is empty"),
        ('{"prompt": "ab", "response": ""}', "response is empty"),
        ('{"prompt": "ab", "response": "bab"}', "6 tokens, above warm_start.tokens_per_step=5,"),
    ],
)
def test_a_bad_line_is_named_with_its_place(tmp_path: Path, line: str, fault: str) -> None:
    source = written(tmp_path / "w.jsonl", '{"prompt": "a", "response": "b"}', line)
    with pytest.raises(ConfigError) as caught:
        read_demonstrations(source, tokenizer=make_tokenizer(), max_tokens=5)
    assert str(caught.value).startswith(f"warm_start.data={source.path}:2: {fault}")
