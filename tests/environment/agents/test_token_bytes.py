"""Bytes of tokens: together they are the text of a turn, wherever a tokenizer cuts it."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from laminar_contrib.agents.token_bytes import TokenBytes

END = "<|end|>"
TEXTS = ["thirty-seven € and 😀", " leading", "a  b\n\tc", "Ā\u00a0ġ", "the the", "▁ _", "<0xE2>"]


def byte_level(*, prefix=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    words = [*alphabet, "th", "the", "Ġthe"]
    backend = tokenizers.Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_fallback():
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", *"abcdehlt"]
    vocab = {word: id for id, word in enumerate(words)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocab |= {word: len(vocab) + place for place, word in enumerate(["th", "the"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def words():
    vocab = {word: id for id, word in enumerate(["thirty", "-", "seven", "?"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


BACKENDS = {"bytes": byte_level(), "fallback": byte_fallback(), "words": words()}


@pytest.fixture(scope="module", params=BACKENDS)
def made(request, tmp_path_factory):
    """A tokenizer, its id that ends a turn, and the bytes of its tokens."""
    backend, folder = BACKENDS[request.param], tmp_path_factory.mktemp("model")
    backend.add_special_tokens([END])
    backend.save(str(folder / "tokenizer.json"))
    end = backend.token_to_id(END)

    def decode_turn(ids):
        kept = [id for place, id in enumerate(ids.tolist()) if place < len(ids) - 1 or id != end]
        return backend.decode(kept, skip_special_tokens=False)

    return backend, end, TokenBytes(folder, decode_turn)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text_together_and_the_end_has_none(made, text):
    backend, end, token_bytes = made
    ids = backend.encode(text, add_special_tokens=False).ids
    found = token_bytes(np.array([*ids, end], np.int32))
    assert b"".join(found) == backend.decode(ids, skip_special_tokens=False).encode()
    assert found[-1] == b""
    assert token_bytes(np.array(ids, np.int32)) == found[:-1]


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_parts_of_a_character_have_a_byte_each(kind, tmp_path):
    backend = BACKENDS[kind]
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = np.array(backend.encode("😀", add_special_tokens=False).ids[-4:], np.int32)
    found = TokenBytes(tmp_path, lambda ids: backend.decode(ids.tolist()))(ids)
    assert [len(data) for data in found] == [1, 1, 1, 1]
    assert b"".join(found).decode() == "😀"
