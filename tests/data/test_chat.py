"""Messages as the model gets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_contrib.supervised.demonstrations import read_demonstrations
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import read_turns
from laminar_py.data.problems import read_prompts
from tests.data.builders import written
from tests.data.templates import (
    EOS,
    SPECIAL,
    TEMPLATES,
    TOOLS,
    USED,
    conversations,
    make_chat_encoder,
    make_tokenizer_folder,
)

NAMES = sorted(TEMPLATES)
ASKED = {"role": "user", "content": "a"}


@pytest.mark.parametrize("name", NAMES)
def test_messages_have_the_ids_that_transformers_gives_them(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    template = TEMPLATES[name]
    encoder = make_chat_encoder(tmp_path, template.text, arguments=template.arguments)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for conversation in conversations(template):
        _, ids = encoder.encode(conversation)
        expected = theirs.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False, **template.arguments
        )
        assert ids.tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_a_turn_is_found_in_the_template_and_ends_responses_first(tmp_path: Path, name: str) -> None:
    encoder = make_chat_encoder(tmp_path, TEMPLATES[name].text)
    assert encoder.tokenizer.eos_ids == (EOS,)
    encoder.encode([ASKED])
    assert encoder.tokenizer.eos_ids == tuple(dict.fromkeys((SPECIAL.index(TEMPLATES[name].end), EOS)))


def test_fields_of_a_turn_go_to_the_template_and_arguments_in_a_text_as_objects(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    encoder = make_chat_encoder(tmp_path, TOOLS)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    plain = [USED[0], USED[1] | {"content": "", "tool_calls": [called]}, USED[2]]
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    text, ids = encoder.encode(read_turns(json.dumps(USED)))
    assert ids.tolist() == expected
    assert "<think>hm</think>" in text
    assert 'add{"a": 2}' in text
    assert "None" not in text


def test_parts_of_text_are_one_text(tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path, TEMPLATES["chatml"].text)
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "="}]
    source = written(tmp_path / "t.jsonl", json.dumps({"messages": [{"role": "user", "content": parts}]}))
    (prompt,) = read_prompts(source, encoder=encoder, max_prompt_tokens=None)
    assert "<|im_start|>user\n2+2 =<|im_end|>" in prompt.text


def test_a_template_without_an_end_of_turn_adds_no_id(tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert encoder.encode([ASKED])[0] == "user: a\n"
    assert encoder.tokenizer.eos_ids == (EOS,)


def test_a_system_prompt_is_put_before_messages_without_one(tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path, TEMPLATES["chatml"].text, system="Be brief.")
    assert encoder.encode([ASKED])[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    own = [{"role": "system", "content": "Own."}, ASKED]
    assert encoder.encode(own)[0].startswith("<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\na")


def test_a_text_stays_as_it_is_unless_texts_are_taken_for_messages(tmp_path: Path) -> None:
    plain = make_chat_encoder(tmp_path, TEMPLATES["headers"].text)
    text, ids = plain.encode("2+2=")
    assert (text, ids[0], plain.uses_template) == ("2+2=", SPECIAL.index("<s>"), False)
    taken = make_chat_encoder(tmp_path, TEMPLATES["headers"].text, texts=True)
    assert taken.encode("2+2=")[1].tolist() == plain.encode([{"role": "user", "content": "2+2="}])[1].tolist()


@pytest.mark.parametrize(
    ("template", "messages", "fault"),
    [
        (
            None,
            [{"role": "user", "content": "a"}],
            "messages, and the tokenizer in model.path=.* has no chat templ",
        ),
        ("turns", [{"role": "system", "content": "a"}], "the chat template refuses .*System role not supported"),
        (
            "chatml",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "the last message is",
        ),
        ("chatml", [], "messages is empty"),
        ("chatml", [{"role": "user", "content": ["a"]}], "expected `object`, got `str` - at `\\$.messages"),
        (
            "chatml",
            [{"role": "user", "content": [{"type": "image"}]}],
            "invalid enum value 'image' - at `\\$.messages",
        ),
        ("chatml", [{"role": "user"}], "a message of 'user' has no content"),
        (
            "chatml",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, ASKED],
            "the arguments of a tool call are no JSON",
        ),
        ("chatml", [{"content": "a"}], "object missing required field `role`"),
    ],
)
def test_messages_that_cannot_be_written_are_one_line(tmp_path: Path, template, messages, fault) -> None:
    encoder = make_chat_encoder(tmp_path, template and TEMPLATES[template].text)
    source = written(tmp_path / "t.jsonl", '{"prompt": "a"}', json.dumps({"messages": messages}))
    with pytest.raises(ConfigError, match=rf"^data\.train=.*t\.jsonl:2: {fault}.*; ") as caught:
        read_prompts(source, encoder=encoder, max_prompt_tokens=None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_problem_of_messages_is_rendered_and_its_reward_gets_them(tmp_path: Path, column: str) -> None:
    encoder = make_chat_encoder(tmp_path, TEMPLATES["turns"].text)
    messages = [{"role": "user", "content": "2+2="}]
    source = written(tmp_path / "t.jsonl", json.dumps({column: messages, "answer": 4, "level": 1}))
    (prompt,) = read_prompts(source, encoder=encoder, max_prompt_tokens=None)
    assert prompt.text == "<s><start_of_turn>user\n2+2=<end_of_turn>\n<start_of_turn>model\n"
    assert json.loads(prompt.fields_json) == {"messages": messages, "level": 1}


def test_demonstrations_of_messages_end_in_the_end_of_a_turn_and_texts_in_the_usual_end(tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path, TEMPLATES["chatml"].text)
    text, chat = (json.dumps({"prompt": prompt, "response": "b"}) for prompt in ("a", [ASKED]))
    source = written(tmp_path / "w.jsonl", text, chat, text)
    found = read_demonstrations(source, encoder=encoder)
    end = SPECIAL.index("<|im_end|>")
    assert [int(one.response_ids[-1]) for one in found] == [EOS, end, EOS]


def test_a_damaged_tokenizer_config_is_one_line(tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model\.path=.*: its tokenizer cannot be loaded .*; fix its files$"):
        encoder.encode([ASKED])


def test_messages_need_no_torch_in_the_controller(tmp_path: Path) -> None:
    make_tokenizer_folder(tmp_path, TEMPLATES["chatml"].text)
    code = (
        "import sys; from pathlib import Path; from laminar_py.data.chat import *\n"
        "from laminar_py.data.tokenizer import load_tokenizer; folder = Path(sys.argv[1])\n"
        "PromptEncoder(load_tokenizer(folder), folder, ChatConfig()).encode([{'role': 'user', 'content': 'a'}])\n"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
