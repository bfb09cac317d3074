"""Demonstrations of the warm start."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from laminar_contrib.supervised.demonstrations import read_demonstrations
from laminar_contrib.supervised.kind import refuse_long
from laminar_contrib.supervised.settings import SupervisedConfig
from laminar_py.config.data import ChatConfig
from laminar_py.config.environment import EnvironmentConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.demonstrations import Demonstrations
from laminar_py.data.sources import DataSource, source_at
from laminar_py.data.tokenizer import load_tokenizer
from tests.data.builders import character_backend, text_encoder
from tests.data.builders import written as written_for
from tests.data.templates import BACKENDS, TEMPLATES, make_chat_encoder, make_tokenizer_folder


def make_encoder() -> PromptEncoder:
    return text_encoder(character_backend("ab"), eos_ids=(7, 8))


def written(path: Path, *lines: str) -> DataSource:
    return written_for(path, *lines, field="warm_start.data")


def test_a_response_ends_in_the_first_eos_id(tmp_path: Path) -> None:
    source = written(tmp_path / "w.jsonl", '{"prompt": "ab", "response": "ba"}')
    (demonstration,) = read_demonstrations(source, encoder=make_encoder())
    assert demonstration.prompt_ids.tolist() == [0, 1]
    assert demonstration.response_ids.tolist() == [1, 0, 7]


def test_a_prompt_begins_as_in_rl_and_its_response_does_not(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<s>": 2}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    source = written(tmp_path / "w.jsonl", '{"prompt": "ab", "response": "ba"}')
    (demonstration,) = read_demonstrations(source, encoder=text_encoder(backend, eos_ids=(7,)))
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
        ('{"prompt": "", "response": "ba"}', "prompt is empty"),
        (
            '{"prompt": "ab", "response": "ba", "tools": [{"type": "function"}]}',
            "`tools` has \"{'type': 'function'}\", unlike the environment, in ",
        ),
        ('{"prompt": "ab", "response": ""}', "response is empty"),
    ],
)
def test_a_bad_line_is_named_with_its_place(tmp_path: Path, line: str, fault: str) -> None:
    source = written(tmp_path / "w.jsonl", '{"prompt": "a", "response": "b"}', line)
    with pytest.raises(ConfigError) as caught:
        read_demonstrations(source, encoder=make_encoder())
    assert str(caught.value).startswith(f"warm_start.data={source.path}:2: {fault}")
    assert "\n" not in str(caught.value)


def test_a_demonstration_that_fits_into_no_step_is_named_with_its_place(tmp_path: Path) -> None:
    lines = ('{"prompt": "a", "response": "b"}', '{"prompt": "ab", "response": "bab"}')
    source = written(tmp_path / "w.jsonl", *lines)
    rows = read_demonstrations(source, encoder=make_encoder())
    refuse_long(Demonstrations(source=source, all=rows, max_tokens=6))
    with pytest.raises(ConfigError, match=r":2: 6 tokens, above warm_start\.tokens_per_step=5, "):
        refuse_long(Demonstrations(source=source, all=rows, max_tokens=5))


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
        for one in read_demonstrations(source, encoder=encoder)
    )
    assert others == [first] * 2
    assert encoder.tokenizer.decode(np.array(first[1]), special=True) == "4<|im_end|>"


MEANT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)  # its generation prompt opens a thought
ADDS = {"function": {"name": "add", "arguments": '{"a": 2}'}}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": "4"}, "\n</think>\n\n4<|im_end|>"),
        ({"content": "4", "reasoning_content": "hm"}, "hm\n</think>\n\n4<|im_end|>"),
        (
            {"content": None, "reasoning_content": "hm", "tool_calls": [ADDS]},
            'hm\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>',
        ),
    ],
)
def test_the_template_writes_thoughts_and_calls_of_a_demonstration(tmp_path, kind, answer, text) -> None:
    encoder = make_chat_encoder(tmp_path / "model", MEANT, kind)
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", **answer}]
    source = written(tmp_path / "w.jsonl", json.dumps({"messages": messages}))
    (one,) = read_demonstrations(source, encoder=encoder)
    given = [
        {name: value for name, value in messages[1].items() if value is not None}
        | {"content": answer["content"] or ""}
    ]
    if "tool_calls" in answer:
        given[0]["tool_calls"] = [{"function": {"name": "add", "arguments": {"a": 2}}}]
    whole = encoder.tokenizer.encode(encoder.conversation([messages[0], *given], answers=False).removesuffix("\n"))
    assert [*one.prompt_ids, *one.response_ids] == whole.tolist()
    assert one.response.removesuffix("\n") == text


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("chatml", {"content": "4", "reasoning_content": "hm"}, "the chat template leaves out 'hm' of the answer"),
        ("chatml", {"content": "", "tool_calls": [ADDS]}, "the chat template leaves out 'add' of the answer"),
        ("thinking", {"content": "<think>hm</think>4"}, "the chat template leaves out 'hm' of the answer"),
        ("opened", {"content": "4"}, "the chat template writes the answer differently from how it begins one"),
    ],
)
def test_a_demonstration_of_which_the_template_leaves_out_a_part_is_refused(tmp_path, name, answer, fault) -> None:
    opened = TEMPLATES["chatml"].text.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    encoder = make_chat_encoder(tmp_path / "model", opened if name == "opened" else TEMPLATES[name].text)
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", **answer}]
    source = written(tmp_path / "w.jsonl", json.dumps({"messages": messages}))
    with pytest.raises(ConfigError) as caught:
        read_demonstrations(source, encoder=encoder)
    assert str(caught.value).startswith(f"warm_start.data={source.path}:1: {fault}")
    assert "\n" not in str(caught.value)


NAMES = MEANT.replace(  # only the first call, and of its arguments only the names
    "<tool_call>{{ call.function | tojson }}</tool_call>",
    "{% if loop.first %}{{ call.function.name }}({{ call.function.arguments | list }}){% endif %}",
)
TWICE = MEANT.replace(  # arguments as JSON in JSON
    "{{ call.function | tojson }}", "{{ call.function.name }}{{ call.function.arguments | tojson | tojson }}"
)
SENT = {"to": 'it\'s "Ö"\n\\d <x>', "all": [1.0, 1e30, True, None, {"c": 2}]}


def calls(*arguments: object) -> dict[str, object]:
    return {
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": each}} for each in arguments],
    }


@pytest.mark.parametrize(
    ("template", "answer", "fault"),
    [
        (NAMES, calls({"a": 2}), "leaves out '2' of the answer"),
        (NAMES, calls('{"a": {"b": ["x y"]}}'), "leaves out 'b' of the answer"),
        (NAMES, calls({}, {}), "leaves out 'add' of the answer"),
        (TEMPLATES["chatml"].text, {"content": "4", "reasoning_content": "4"}, "leaves out '4' of the answer"),
        (MEANT, calls(SENT, SENT), None),
        (TWICE, calls(SENT, "[1, 2]"), None),
        (MEANT, {"content": "4", "reasoning_content": "4", "reasoning": "4"}, None),
    ],
)
def test_each_value_of_a_call_and_each_repetition_is_in_the_response(tmp_path, template, answer, fault) -> None:
    encoder = make_chat_encoder(tmp_path / "model", template)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", **answer}]
    source = written(tmp_path / "w.jsonl", json.dumps({"messages": messages}))
    if fault is None:
        assert len(read_demonstrations(source, encoder=encoder)) == 1
        return
    with pytest.raises(ConfigError, match=fault):
        read_demonstrations(source, encoder=encoder)


class Tools(EnvironmentConfig):
    """An environment with one tool."""

    @property
    def definitions(self):
        return [{"type": "function", "function": {"name": "add", "parameters": {}}}]


ADD, SUB = ({"type": "function", "function": {"name": name}} for name in ("add", "sub"))


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        ([ADD], None),
        (json.dumps([ADD]), None),
        ("", None),
        (None, None),
        ([ADD, SUB], "`tools` has 'sub', unlike the environment,"),
        (json.dumps([SUB["function"]]), "`tools` has 'sub', unlike the environment,"),
        ("sub", "`tools` has 'sub', unlike the environment,"),
        (3, "`tools` has '3', unlike the environment,"),
    ],
)
def test_tools_of_a_demonstration_are_the_environments(tmp_path: Path, tools: object, fault: str | None) -> None:
    shows_tools = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATES["chatml"].text
    made = make_chat_encoder(tmp_path / "model", shows_tools)
    encoder = PromptEncoder(made.tokenizer, tmp_path / "model", ChatConfig(texts=True), Tools())
    source = written(tmp_path / "w.jsonl", json.dumps({"prompt": "a", "response": "b", "tools": tools}))
    if fault is None:
        assert len(read_demonstrations(source, encoder=encoder)) == 1
        return
    with pytest.raises(ConfigError, match=fault):
        read_demonstrations(source, encoder=encoder)


def test_an_end_that_a_demonstration_has_itself_is_not_written_twice(tmp_path: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(make_tokenizer_folder(tmp_path / "m", None)), tmp_path, ChatConfig())
    source = written(
        tmp_path / "w.jsonl", '{"prompt": "a", "response": "b</s>"}', '{"prompt": "a", "response": "b"}'
    )
    first, second = read_demonstrations(source, encoder=encoder)
    assert first.response_ids.tolist() == second.response_ids.tolist()


def renamed(path: Path) -> DataSource:
    settings = SupervisedConfig.model_validate(
        {"data": {"path": str(path), "columns": {"messages": "talk.turns"}}}
    )
    return DataSource("warm_start.data", settings.data)
