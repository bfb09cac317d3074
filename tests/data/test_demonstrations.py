"""Demonstrations of the warm start."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from laminar_py.config.data import WarmStartConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.demonstrations import read_demonstrations
from laminar_py.data.sources import DataSource, source_at
from tests.data.builders import character_backend, text_encoder
from tests.data.builders import written as written_for
from tests.data.templates import TEMPLATES, make_chat_encoder


def make_encoder() -> PromptEncoder:
    return text_encoder(character_backend("ab"), eos_ids=(7, 8))


def written(path: Path, *lines: str) -> DataSource:
    return written_for(path, *lines, field="warm_start.data")


def test_a_response_ends_in_the_first_eos_id(tmp_path: Path) -> None:
    source = written(tmp_path / "w.jsonl", '{"prompt": "ab", "response": "ba"}')
    (demonstration,) = read_demonstrations(source, encoder=make_encoder(), max_tokens=5)
    assert demonstration.prompt_ids.tolist() == [0, 1]
    assert demonstration.response_ids.tolist() == [1, 0, 7]


def test_a_prompt_begins_as_in_rl_and_its_response_does_not(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<s>": 2}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    source = written(tmp_path / "w.jsonl", '{"prompt": "ab", "response": "ba"}')
    (demonstration,) = read_demonstrations(source, encoder=text_encoder(backend, eos_ids=(7,)), max_tokens=6)
    assert demonstration.prompt_ids.tolist() == [2, 0, 1]
    assert demonstration.response_ids.tolist() == [1, 0, 7]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "ab", "answer": "ba"}', "no `response` in "),
        ('{"response": "ba"}', "no `prompt` in "),
        ('{"messages": [{"role": "user", "content": "ab"}]}', "no `response` in "),
        ('{"messages": [{"role": "assistant", "content": "ab"}]}', "prompt is empty in "),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}',
            "response is empty in ",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}]}',
            "the last message calls a tool, but a response is text in ",
        ),
        ('{"prompt": "", "response": "ba"}', "prompt is empty"),
        ('{"prompt": "ab", "response": ""}', "response is empty"),
        ('{"prompt": "ab", "response": "bab"}', "6 tokens, above warm_start.tokens_per_step=5,"),
    ],
)
def test_a_bad_line_is_named_with_its_place(tmp_path: Path, line: str, fault: str) -> None:
    source = written(tmp_path / "w.jsonl", '{"prompt": "a", "response": "b"}', line)
    with pytest.raises(ConfigError) as caught:
        read_demonstrations(source, encoder=make_encoder(), max_tokens=5)
    assert str(caught.value).startswith(f"warm_start.data={source.path}:2: {fault}")
    assert "\n" not in str(caught.value)


def test_messages_that_end_with_the_assistants_are_prompt_and_response(tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path / "model", TEMPLATES["chatml"].text)
    asked, answer = [{"role": "user", "content": "2+2?"}], "4"
    pair = {"prompt": asked, "response": answer}
    whole = {"talk": {"turns": [*asked, {"role": "assistant", "content": answer}]}}
    rows = [{"messages": asked, "response": answer}, pair]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "wholes.jsonl").write_text(json.dumps(whole) + "\n")
    given = (source_at(tmp_path / "pairs.jsonl", "warm_start.data"), renamed(tmp_path / "wholes.jsonl"))
    first, *others = (
        (one.prompt_ids.tolist(), one.response_ids.tolist())
        for source in given
        for one in read_demonstrations(source, encoder=encoder, max_tokens=256)
    )
    assert others == [first] * 2
    assert encoder.tokenizer.decode(np.array(first[1]), special=True) == "4<|im_end|>"


def renamed(path: Path) -> DataSource:
    settings = WarmStartConfig.model_validate({"data": {"path": str(path), "columns": {"messages": "talk.turns"}}})
    return DataSource("warm_start.data", settings.data)
