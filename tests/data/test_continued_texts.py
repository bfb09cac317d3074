"""Text that continues a sequence has its ids there, also where a tokenizer puts a space before texts."""

import json

import numpy as np
import pytest
import tokenizers

from laminar_contrib.supervised.demonstrations import read_demonstrations
from laminar_py.config.data import ChatConfig
from laminar_py.config.environment import EnvironmentConfig
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.sources import source_at
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.environment.protocol import Observation, Rewrite
from laminar_py.environment.writer import PlainWriter, open_writer
from tests.data.templates import BACKENDS, TEMPLATES, make_chat_encoder, make_tokenizer_folder

every_kind = pytest.mark.parametrize("kind", BACKENDS)
CLOSE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' if m.role == 'assistant' else '[INST]' }}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)  # texts directly behind special tokens


@every_kind
@pytest.mark.parametrize("text", ["4", " 4", "\n4", "\n\n a", "No. Again.", "π", ".", "a", ""])
def test_a_text_that_continues_another_adds_no_space(tmp_path, kind, text):
    tokenizer = load_tokenizer(make_tokenizer_folder(tmp_path, None, kind))
    for literal in (False, True):
        ids = np.concatenate([tokenizer.encode("2+2="), tokenizer.encode_next(text, literal=literal)])
        assert tokenizer.decode(ids, special=True).removeprefix(" ") == f"2+2={text}"
        assert ids.tolist() == tokenizer.encode(f"2+2={text}").tolist()


@every_kind
def test_an_added_token_that_is_not_special_parts_texts_as_a_special_one_does(tmp_path, kind):
    folder = make_tokenizer_folder(tmp_path, None, kind)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<call>"])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    for before in ("a<call>", "a</s>", "a"):
        ids = np.concatenate([tokenizer.encode(before), tokenizer.encode_next("hm", after=before)])
        assert ids.tolist() == tokenizer.encode(f"{before}hm").tolist(), before


@every_kind
def test_words_of_an_environment_follow_a_turn_without_a_space(tmp_path, kind):
    tokenizer = load_tokenizer(make_tokenizer_folder(tmp_path, None, kind))
    writer = PlainWriter(tokenizer, stop_ids=tokenizer.eos_ids)
    ids = np.concatenate([tokenizer.encode("2+2="), writer.encode_next(Observation("No </s>"))])
    assert tokenizer.decode(ids, special=True).removeprefix(" ") == "2+2=No </s>"
    assert not set(tokenizer.eos_ids) & set(ids.tolist())


@every_kind
@pytest.mark.parametrize("template", [TEMPLATES["chatml"].text, CLOSE], ids=["chatml", "close"])
def test_a_conversation_in_turns_has_the_ids_of_the_template(tmp_path, kind, template):
    made = make_chat_encoder(tmp_path, template, kind)
    encoder = PromptEncoder(made.tokenizer, tmp_path, ChatConfig(), EnvironmentConfig())
    writer = open_writer(tmp_path, ChatConfig(), EnvironmentConfig(), messages=True)
    asked = [{"role": "user", "content": "2+2="}]
    _, prompt = encoder.encode(asked)
    said = {"role": "assistant", "content": "four"}
    more = {"role": "user", "content": "and 3?"}
    before = encoder.conversation(asked, answers=True)
    turn = encoder.conversation([*asked, said], answers=False)[len(before) :].removesuffix("\n")
    ids = [prompt, writer.encode_first(Observation()), encoder.tokenizer.encode_next(turn, after=before)]
    ids.append(writer.encode_next(Observation("and 3?")))
    whole = encoder.tokenizer.encode(encoder.conversation([*asked, said, more], answers=True))
    assert np.concatenate(ids).tolist() == whole.tolist()
    again = writer.encode_conversation(Rewrite((("user", "2+2="), ("assistant", "four"), ("user", "and 3?"))))
    assert again.tolist() == whole.tolist()


@every_kind
def test_a_demonstration_has_the_ids_of_its_whole_text(tmp_path, kind):
    encoder = PromptEncoder(load_tokenizer(make_tokenizer_folder(tmp_path, None, kind)), tmp_path, ChatConfig())
    (tmp_path / "w.jsonl").write_text(json.dumps({"prompt": "2+2=", "response": "is 4"}) + "\n")
    (one,) = read_demonstrations(source_at(tmp_path / "w.jsonl", "warm_start.data"), encoder=encoder)
    whole = encoder.tokenizer.encode_prompt("2+2=is 4").tolist()
    assert [*one.prompt_ids, *one.response_ids] == [*whole, *encoder.tokenizer.eos_ids]


@every_kind
def test_tags_of_reasoning_that_are_special_tokens_stay_in_a_response(tmp_path, kind):
    tokenizer = load_tokenizer(make_tokenizer_folder(tmp_path, None, kind))
    assert tokenizer.decode(tokenizer.encode("<think>a</think>b</s>")).replace(" ", "") == "<think>a</think>b"
