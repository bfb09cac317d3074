"""The format of calls: what the chat template of the model writes is what the environment reads, or a refusal."""

import pytest

from laminar_contrib.agents.kind import AgentConfig
from laminar_contrib.tools.call_formats import CallFamily, ToolCall
from laminar_contrib.tools.kind import ShownIn, ToolsEnvironment, ToolSettings
from laminar_contrib.tools.tool_environment import CallTurns, load_tools
from laminar_py.config.data import ChatConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.tokenizer import load_tokenizer
from tests.data.templates import TEMPLATES, make_chat_encoder

ASKED = [{"role": "user", "content": "2+2="}]
SHOWN = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
HEAD = (
    SHOWN + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
)
TAIL = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL = "{{ call.function.name }}"
ARGUMENTS = "{{ call.function.arguments | tojson }}"
HERMES = f'\n<tool_call>\n{{"name": "{CALL}", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA = f'{{"name": "{CALL}", "parameters": {ARGUMENTS}}}'
XML = (
    f"\n<tool_call>\n<function={CALL}>\n{{% for name, value in call.function.arguments | items %}}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
MISTRAL = f'[TOOL_CALLS][{{"name": "{CALL}", "arguments": {ARGUMENTS}}}]'


def environment(kind, family, shown_in="template"):
    if kind == "agent":
        return AgentConfig(command=["agent"], family=CallFamily(family))
    tools = ToolSettings(use=["calculator"], family=CallFamily(family), shown_in=ShownIn(shown_in))
    return ToolsEnvironment(tools=tools)


def write(folder, template, settings, prompt=ASKED, **chat):
    make_chat_encoder(folder, template)
    encoder = PromptEncoder(load_tokenizer(folder), folder, ChatConfig(**chat), settings)
    return encoder.write(prompt)


@pytest.mark.parametrize("kind", ["tools", "agent"])
@pytest.mark.parametrize(("call", "family"), [(HERMES, "hermes"), (LLAMA, "llama"), ("", "hermes")])
def test_a_family_that_the_template_writes_is_taken_and_so_is_a_template_without_calls(
    tmp_path, kind, call, family
):
    assert "2+2=" in write(tmp_path, HEAD + call + TAIL, environment(kind, family))


@pytest.mark.parametrize(
    ("kind", "field"), [("tools", "environment.tools.family=hermes"), ("agent", "environment.family=hermes")]
)
@pytest.mark.parametrize(
    ("call", "remedy"), [(XML, "name another model"), (MISTRAL, "name another model"), (LLAMA, "set llama")]
)
def test_a_template_that_writes_another_format_is_refused(tmp_path, kind, field, call, remedy):
    with pytest.raises(ConfigError, match=f"{field}: the model's chat template writes a call as .*; {remedy}"):
        write(tmp_path, HEAD + call + TAIL, environment(kind, "hermes"))


SILENT = TEMPLATES["chatml"].text  # shows no tools, as SmolLM2's


def test_a_template_that_shows_no_tools_is_refused_and_the_system_message_shows_them_on_request(tmp_path):
    with pytest.raises(ConfigError, match=r"shows the model no tools; set environment\.tools\.shown_in=system"):
        write(tmp_path, SILENT, environment("tools", "hermes"))
    text = write(tmp_path, SILENT, environment("tools", "hermes", "system"))
    assert '"name": "calculator"' in text
    assert "<tool_call>{" in text
    assert "calculator" not in write(tmp_path, SILENT, environment("tools", "hermes", "prompt"))


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("hermes", '<tool_call>{"name": "calculator", "arguments": {"expression": "12*3"}}</tool_call>'),
        ("llama", '{"name": "calculator", "parameters": {"expression": "12*3"}}'),
        ("tags", "<calculator>12*3</calculator>"),
    ],
)
def test_a_model_that_follows_the_system_message_is_understood(tmp_path, family, call):
    settings = environment("tools", family, "system")
    text = write(tmp_path, SILENT, settings)
    shape = {"hermes": '<tool_call>{"name"', "llama": '{"name": "<tool>", "parameters"', "tags": "<calculator>exp"}
    assert shape[family] in text
    turns = CallTurns(settings.tools, load_tools(settings.tools))
    assert turns.read_calls(call) == ([ToolCall("calculator", {"expression": "12*3"})], False)


def test_the_tools_end_the_system_message_that_is_there(tmp_path):
    settings = environment("tools", "hermes", "system")
    asked = [{"role": "system", "content": "Be brief."}, *ASKED]
    for text in (write(tmp_path, SILENT, settings, asked), write(tmp_path, SILENT, settings, system="Be brief.")):
        assert text.count("<|im_start|>system") == 1
        assert text.index("Be brief.") < text.index("calculator") < text.index("2+2=")


@pytest.mark.parametrize("shown_in", ["template", "system"])
def test_an_empty_system_message_stays_and_so_does_a_message_of_other_keys(tmp_path, shown_in):
    settings = environment("tools", "hermes", shown_in)
    empty = {"role": "system", "content": "", "name": "x"}
    make_chat_encoder(tmp_path, HEAD + HERMES + TAIL)
    encoder = PromptEncoder(load_tokenizer(tmp_path), tmp_path, ChatConfig(), settings)
    first = encoder.with_system([empty, *ASKED])[0]
    assert first == (empty if shown_in == "template" else empty | {"content": settings.system_text})
    encoder = PromptEncoder(load_tokenizer(tmp_path), tmp_path, ChatConfig(system=""), None)
    assert encoder.with_system(ASKED)[0] == {"role": "system", "content": ""}


@pytest.mark.parametrize(("shown_in", "refused"), [("template", True), ("system", True), ("prompt", False)])
def test_plain_texts_show_no_tool(tmp_path, shown_in, refused):
    settings = environment("tools", "hermes", shown_in)
    if refused:
        with pytest.raises(ConfigError, match="the prompts are plain texts, to which no tool is added"):
            write(tmp_path, HEAD + HERMES + TAIL, settings, "2+2=")
        assert "calculator" in write(tmp_path, HEAD + HERMES + TAIL, settings, "2+2=", texts=True)
    else:
        assert write(tmp_path, SILENT, settings, "2+2=") == "2+2="


THOUGHTFUL = """{% if tools %}<tools>{{ tools | tojson }}</tools>
Write <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call>.
{% endif %}""" + (HEAD + HERMES + TAIL).replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


@pytest.mark.parametrize("closing", ["", "\n</think>\n\n"])
def test_a_template_that_shows_calls_in_its_prompt_and_opens_a_thought_is_taken(tmp_path, closing):
    template = THOUGHTFUL.replace("<think>\n", f"<think>\n{closing}")
    assert "2+2=" in write(tmp_path, template, environment("tools", "hermes"))


def test_a_template_that_takes_arguments_as_text_alone_is_refused_too(tmp_path):
    call = f"[call]{CALL}\n{{{{ '```json\n' + call.function.arguments + '\n```' }}}}[/call]"
    with pytest.raises(ConfigError, match=r"writes a call as '\[call\]probe.*; name another model"):
        write(tmp_path, HEAD + call + TAIL, environment("agent", "hermes"))


def test_tags_are_exempt(tmp_path):
    assert "2+2=" in write(tmp_path, HEAD + XML + TAIL, environment("tools", "tags"))
