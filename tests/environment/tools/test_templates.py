"""The format of calls: what the chat template of the model writes is what the environment reads, or a refusal."""

import pytest

from laminar_contrib.agents.kind import AgentConfig
from laminar_contrib.tools.call_formats import CallFamily
from laminar_contrib.tools.kind import ToolsEnvironment, ToolSettings
from laminar_py.config.data import ChatConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.tokenizer import load_tokenizer
from tests.data.templates import TEMPLATES, make_chat_encoder

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
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


def environment(kind, family):
    if kind == "agent":
        return AgentConfig(command=["agent"], family=CallFamily(family))
    return ToolsEnvironment(tools=ToolSettings(use=["calculator"], family=CallFamily(family)))


def write(folder, template, settings):
    make_chat_encoder(folder, template)
    encoder = PromptEncoder(load_tokenizer(folder), folder, ChatConfig(), settings)
    return encoder.write([{"role": "user", "content": "2+2="}])


@pytest.mark.parametrize("kind", ["tools", "agent"])
@pytest.mark.parametrize(("call", "family"), [(HERMES, "hermes"), (LLAMA, "llama"), ("", "hermes")])
def test_a_family_that_the_template_writes_is_taken_and_so_is_a_template_without_calls(
    tmp_path, kind, call, family
):
    template = HEAD + call + TAIL if call else TEMPLATES["chatml"].text
    assert "2+2=" in write(tmp_path, template, environment(kind, family))


@pytest.mark.parametrize(
    ("kind", "field"), [("tools", "environment.tools.family=hermes"), ("agent", "environment.family=hermes")]
)
@pytest.mark.parametrize(
    ("call", "remedy"), [(XML, "name another model"), (MISTRAL, "name another model"), (LLAMA, "set llama")]
)
def test_a_template_that_writes_another_format_is_refused(tmp_path, kind, field, call, remedy):
    with pytest.raises(ConfigError, match=f"{field}: the model's chat template writes a call as .*; {remedy}"):
        write(tmp_path, HEAD + call + TAIL, environment(kind, "hermes"))


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
