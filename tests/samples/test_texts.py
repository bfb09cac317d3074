"""Texts of tokens: joined they are the response, and each character stands with the token that completes it."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from laminar_lab.audit.samples import token_texts
from laminar_py.data.tokenizer import Tokenizer

CORPUS = [
    "The number 42 is 6 * 7, said Zoë.",
    "日本語のテキスト、日本 и русский",
    "def f(x):\n    return x + 1\n",
    "😀🚀👩‍🚀 ok",
]


def byte_level():
    """Byte-level BPE, trained here, with merges that split characters, and special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_end|>", "<｜é｜>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return Tokenizer(backend, eos_ids=(1,))


def sentencepiece():
    """SentencePiece's way: `▁` for a space, bytes where no word is, nothing before the first word."""
    bytes_ = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = {"▁": 259, "▁a": 260, "b": 261, "日": 262}
    backend = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, **bytes_, **words}, []))
    rewrites = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(rewrites)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, eos_ids=(2,))


def words(decoder=None):
    """A vocabulary of words; without a decoder they are joined by spaces."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "##b": 1, "c</w>": 2, ".": 3, "é": 4}, "a"))
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, eos_ids=(0,))


KINDS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(),
    "fuse": words(decoders.Fuse()),
    "spaces": words(),
    "word pieces": words(decoders.WordPiece()),
    "suffixes": words(decoders.BPEDecoder()),
}


def texts(tokenizer, ids):
    return token_texts(tokenizer, np.array(ids, np.int32))


def check(tokenizer, ids):
    found = texts(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(np.array(ids, np.int32), special=True)


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_token_by_token(text):
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode(text)
    assert "".join(token_texts(tokenizer, ids)) == text
    check(tokenizer, ids.tolist())


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_joined_texts_are_the_decoded_response_whatever_the_tokens(kind, data):
    tokenizer = KINDS[kind]
    check(tokenizer, data.draw(st.lists(st.integers(0, tokenizer.num_ids + 3), max_size=40)))


def test_bytes_of_a_character_stand_with_the_token_that_completes_it():
    tokenizer = KINDS["byte level"]
    emoji = [tokenizer.encode("a").tolist()[0], *byte_ids("😀")]
    assert texts(tokenizer, emoji) == ["a", "", "", "", "😀"]
    assert texts(tokenizer, [*byte_ids("日")[:2], 1]) == ["", "", "\ufffd<|im_end|>"]
    assert texts(tokenizer, byte_ids("日")[:2]) == ["", "\ufffd"]


def byte_ids(text):
    """Ids of the single bytes of a text, in the byte-level vocabulary."""
    vocabulary = json.loads(KINDS["byte level"]._backend.to_str())["model"]["vocab"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (characters, _) = alphabet.pre_tokenize_str(text)[0]
    return [vocabulary[character] for character in characters]


def test_words_of_sentencepiece_keep_their_spaces_and_broken_bytes_are_seen():
    tokenizer = KINDS["sentencepiece"]
    bytes_ = [3 + byte for byte in "😀".encode()]
    assert texts(tokenizer, [260, 261, 259, 262, *bytes_, 2]) == ["a", "b", " ", "日", "", "", "", "😀", "</s>"]
    assert texts(tokenizer, [261, *bytes_[:2], 260]) == ["b", "", "", "\ufffd\ufffd a"]


def test_words_without_a_decoder_have_the_spaces_between():
    assert texts(KINDS["spaces"], [0, 4, 3]) == ["a", " é", " ."]
    assert texts(KINDS["fuse"], [0, 4, 3]) == ["a", "é", "."]
