"""Calls in the formats of families: what is written is read, and no text raises."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_contrib.tools.call_formats import (
    BrokenCall,
    HermesCalls,
    LlamaCalls,
    TagCalls,
    ToolCall,
    read_turn,
)

TAGS = TagCalls({"calculator": "expression", "search": "query"})
FORMATS = {"hermes": HermesCalls(), "llama": LlamaCalls(), "tags": TAGS}
PIECES = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<calculator>", "</calculator>"),
    *("<search>", "</search>", '{"name": ', '"add"', ', "arguments": {', ', "parameters": {', "}", "}}", "[", "{"),
    *(";", "\n", '"', "\\", "NaN", "1e999", "9" * 5000, "\ud800", "\x00"),
)
TURNS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)
WORDS = st.text() | st.sampled_from([piece for piece in PIECES if "\ud800" not in piece])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.builds(ToolCall, WORDS, st.dictionaries(WORDS, VALUES, max_size=3)), max_size=3)
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def calls_of(form, turn):
    return read_turn(turn, form)[1]


@every_format
@given(turn=TURNS)
def test_no_text_raises(form, turn):
    text, calls = read_turn(turn, form)
    assert len(text) <= len(turn)
    assert all(isinstance(call, ToolCall | BrokenCall) for call in calls)


def written(call, arguments):
    text = json.dumps({"name": call.name, arguments: call.arguments}, ensure_ascii=False)
    return text.replace("<", "\\u003c")  # so that no text of it is a mark


@given(calls=CALLS)
def test_calls_that_are_written_are_read_as_they_were(calls):
    hermes = "\n".join(f"<tool_call>{written(call, 'arguments')}</tool_call>" for call in calls)
    llama = "; ".join(written(call, "parameters") for call in calls)
    for form, turn in ((HermesCalls(), hermes), (LlamaCalls(), llama)):
        assert calls_of(form, turn) == calls
        assert calls_of(form, f"<think>{turn}</think>\n{turn}") == calls


@given(bodies=st.lists(st.tuples(st.sampled_from(["calculator", "search"]), WORDS), max_size=3))
def test_tags_that_are_written_are_read_as_they_were(bodies):
    names = {"calculator": "expression", "search": "query"}
    plain = [(name, body.replace("<", "")) for name, body in bodies]
    turn = "\n".join(f"<{name}>{body}</{name}>" for name, body in plain)
    assert calls_of(TAGS, turn) == [ToolCall(name, {names[name]: body}) for name, body in plain]


@given(turn=TURNS)
def test_text_that_holds_no_mark_of_a_call_is_none(turn):
    assert calls_of(FORMATS["hermes"], turn.replace("<", "")) == []
    assert calls_of(TAGS, turn.replace("<", "")) == []
    assert calls_of(FORMATS["llama"], turn.replace("{", "").replace("<", "")) == []


def test_hermes_calls_as_qwen_writes_them():
    turn = (
        "I will add them.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": [2]}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"text": "</tool_call>"}, "name": "say"}\n</tool_call>'
    )
    first = ToolCall("add", {"a": 1, "b": {"c": [2]}})
    assert calls_of(HermesCalls(), turn) == [first, ToolCall("say", {"text": "</tool_call>"})]


@pytest.mark.parametrize(
    "turn",
    [
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}};{"name": "add", "parameters": {"a": 2}}',
        'Let me see.<|python_tag|>{"name": "add", "parameters": {"a": 1}}\n{"name": "add", "arguments": {"a": 2}}',
        '\n{"type": "function", "name": "add", "parameters": {"a": 1}}\n{"name": "add", "parameters": {"a": 2}} .',
        '{"parameters": {"a": 1}, "name": "add"}<|python_tag|>{"name": "add", "parameters": {"a": 2}}',
    ],
)
def test_llama_calls_in_their_several_forms(turn):
    assert calls_of(LlamaCalls(), turn) == [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})]


@pytest.mark.parametrize(
    "turn",
    ["{1, 2, 3}", '{"answer": 4}', 'It is {"name": "add", "parameters": {}}', "", '[{"name": "add"}]'],
)
def test_llama_text_that_is_an_answer_is_no_call(turn):
    assert calls_of(LlamaCalls(), turn) == []


def test_tags_stand_in_text_and_other_tags_are_text():
    turn = "<b>So</b> <calculator>12*3</calculator> and <search>\n</calculator></search> <answer>1</answer>"
    calls = [("calculator", "expression", "12*3"), ("search", "query", "\n</calculator>")]
    assert calls_of(TAGS, turn) == [ToolCall(name, {key: body}) for name, key, body in calls]


@pytest.mark.parametrize(
    ("form", "turn", "fault"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "no </tool_call> after it"),
        ("hermes", "<tool_call>add(1)</tool_call>", "it is not JSON (Expecting value)"),
        (
            "hermes",
            '<tool_call>{"name": "add", "parameters": {}}</tool_call>',
            'write {"name": "...", "arguments": ',
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
            'write {"name": "...", "arguments',
        ),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'write {"name": "...", "arguments": '),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}} {}</tool_call>', "more than one JSON object before"),
        (
            "hermes",
            f"<tool_call>{'[' * 100_000}</tool_call>",
            "it is not JSON (too deep or with too large a number)",
        ),
        (
            "hermes",
            f"<tool_call>{'9' * 100_000}</tool_call>",
            "it is not JSON (too deep or with too large a number)",
        ),
        ("hermes", '<tool_call>{"name": NaN}</tool_call>', "it is not JSON"),
        ("llama", '{"name": "add", "parameters": {"a": 1}', "it is not JSON (Expecting ',' delimiter)"),
        ("llama", "<|python_tag|>print(1)", "it is not JSON (Expecting value)"),
        ("llama", "<|python_tag|>", "it is not JSON (Expecting value)"),
        ("llama", '{"name": "add"}', 'write {"name": "...", "parameters": {...}}'),
        ("tags", "<calculator>12*3", "no </calculator> after <calculator>"),
    ],
)
def test_what_is_meant_as_a_call_and_is_none_says_why(form, turn, fault):
    (call,) = calls_of(FORMATS[form], turn)
    assert isinstance(call, BrokenCall)
    assert call.fault.startswith(fault)


def test_a_broken_call_hides_none_of_those_after_it():
    turn = '<tool_call>{</tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert [type(call) for call in calls_of(HermesCalls(), turn)] == [BrokenCall, ToolCall]


ADD = '{"name": "add", "arguments": {"a": 1}}'
CALL = f"<tool_call>{ADD}</tool_call>"


@pytest.mark.parametrize(
    ("turn", "text", "count"),
    [
        (f"<think>try {CALL}</think>So {CALL} it is", f"<think>try {CALL}</think>So  it is", 1),
        (f"try {CALL}</think>So {CALL}", "try </think>So ", 1),
        (f"{CALL} and {CALL} done", " and  done", 2),
        (f"<think>{CALL}", f"<think>{CALL}", 0),
    ],
)
def test_a_draft_in_a_thought_is_no_call_and_text_behind_a_call_stays(turn, text, count):
    assert read_turn(turn, HermesCalls()) == (text, [ToolCall("add", {"a": 1})] * count)


@pytest.mark.parametrize("mark", ["<think>", "</think>", "<think>a</think>", "</think>b<think>"])
def test_marks_of_reasoning_in_the_arguments_of_a_call_are_data(mark):
    arguments = {"text": mark}
    text = json.dumps({"name": "say", "arguments": arguments})
    for form, turn in ((HermesCalls(), f"<tool_call>{text}</tool_call>"), (LlamaCalls(), text)):
        assert calls_of(form, turn) == [ToolCall("say", arguments)]
        assert calls_of(form, f"<think>so</think>\n{turn}") == [ToolCall("say", arguments)]
    assert calls_of(TAGS, f"<search>{mark}</search>") == [ToolCall("search", {"query": mark})]


@every_format
@pytest.mark.parametrize(
    "piece",
    [
        *(piece for piece in PIECES if len(piece) < 100),
        *("</think>{", "<think><tool_call></think>", "<think><search></think>", "<calculator>1</calculator>"),
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    ],
)
def test_the_cost_of_a_long_turn_is_bounded(form, piece):
    start = time.process_time()
    read_turn(piece * 50_000, form)
    assert time.process_time() - start < 5
