"""Text to token ids and back, with the model folder's own tokenizer. Owns the end-of-sequence ids.

The controller encodes prompts when a run starts, scorers decode responses for the reward; nothing that an engine
generated is ever encoded again. Invariant: a prompt has the ids that transformers makes of it from the same
`tokenizer.json`, but for an end of sequence, or a second beginning of one.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import tokenizers

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import IntArray

LONGER_COMPOSED = 3  # times as many bytes a text may have once it is composed


class Tokenizer:
    """Encodes prompts and responses, decodes responses. `eos_ids` end a response; the first is the usual one.

    With the quickstart's word-level tokenizer `encode_prompt("e-2;o*7;1x5?")` has 7 ids and `eos_ids` is `(1,)`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, eos_ids: tuple[int, ...]) -> None:
        backend.no_truncation()  # a file may ask for either, and a prompt is neither cut nor filled
        backend.no_padding()
        self._backend = backend
        self._num_added = backend.num_special_tokens_to_add(False)
        self._of_bytes = _is_of_bytes(backend)
        self._unknown = None if self._of_bytes else _unknown_id(backend)
        self.eos_ids = eos_ids

    @property
    def num_ids(self) -> int:
        """Number of ids, added tokens included: one more than the highest."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    def ending(self, first: tuple[int, ...]) -> "Tokenizer":
        """A tokenizer where the ids `first` end a response too, and come before the others."""
        return Tokenizer(self._backend, eos_ids=tuple(dict.fromkeys((*first, *self.eos_ids))))

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Names of the special tokens, the longest first."""
        found = [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]
        return tuple(sorted(found, key=len, reverse=True))

    def first_special(self, text: str) -> tuple[int, ...]:
        """The first special token in a text, if there is one."""
        special = {id for id, token in self._backend.get_added_tokens_decoder().items() if token.special}
        return tuple(id for id in self.encode(text).tolist() if id in special)[:1]

    def encode(self, text: str) -> IntArray:
        """[n] token ids of `text`, none added."""
        return np.array(self._encoding(text, begun=False).ids, dtype=np.int32)

    def encode_literal(self, text: str) -> IntArray:
        """[n] token ids of `text` in which the name of a special token is text like any other."""
        (encoding,) = self._literal.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def encode_prompt(self, text: str) -> IntArray:
        """[n] token ids of `text` after those with which the tokenizer's post-processor begins a text.

        A text that is written with them, as chat templates do, has them once. Without a token of its own it has
        none at all.
        """
        return np.array(_begun(self._encoding(text, begun=True)), dtype=np.int32)

    def _encoding(self, text: str, *, begun: bool) -> tokenizers.Encoding:
        """Encoding of a text, without the places of tokens in it, which cost as much as all else."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=begun)
        return encoding

    def count(self, texts: Sequence[str], *, begun: bool) -> list[int]:
        """Number of ids of each text, where they are `begun` those of `encode_prompt`, else of `encode`."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=begun)
        return [len(_begun(encoding)) if begun else len(encoding) for encoding in encodings]

    def at_most(self, text: str) -> int | None:
        """Number of ids that a text surely does not exceed; None where that is not known without making them.

        Known of tokenizers of bytes, which moreover make at least one id of any text that is not empty.
        """
        if not self._of_bytes:
            return None
        num_bytes = len(text) if text.isascii() else LONGER_COMPOSED * len(text.encode())
        return 2 * num_bytes + 1 + self._num_added  # a space may be put before each text between two added tokens

    @property
    def has_unknown(self) -> bool:
        """True where words that it does not have become a token for unknown ones."""
        return self._unknown is not None

    def unknown(self, text: str) -> list[str]:
        """Words of a text that become that token, but for the token itself."""
        if self._unknown is None:
            return []
        encoding = self._backend.encode(text, add_special_tokens=False)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        words = [text[begin:end] for id, (begin, end) in spans if id == self._unknown]
        return [word for word in words if word != self.word(self._unknown)]

    def word(self, id: int) -> str:
        """The token of an id, "" where there is none."""
        return self._backend.id_to_token(id) or ""

    def decode(self, ids: IntArray, *, special: bool = False) -> str:
        """Text of [n] `ids`; unless they are asked for special tokens, such as the end, leave nothing."""
        return self._backend.decode(ids.tolist(), skip_special_tokens=not special)


def _is_of_bytes(backend: tokenizers.Tokenizer) -> bool:
    """True for what makes ids of the bytes of a text, which is composed (NFC) before, or stays as it is."""
    steps = repr(backend.pre_tokenizer)
    unchanged = backend.normalizer is None or isinstance(backend.normalizer, tokenizers.normalizers.NFC)
    return unchanged and "ByteLevel" in steps and "Metaspace" not in steps


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Id of unknown words; None where there is none, or bytes are written in their place."""
    model = msgspec.json.decode(backend.to_str(), type=_Written).model
    if model.byte_fallback:
        return None
    return model.unk_id if model.unk_token is None else backend.token_to_id(model.unk_token)


def _begun(encoding: tokenizers.Encoding) -> list[int]:
    """Ids of a text after those that the post-processor puts before it, which it may have already."""
    added = encoding.special_tokens_mask  # 1 for what the post-processor adds before, between and behind
    if 0 not in added:
        return []
    begin, end = added.index(0), len(added) - added[::-1].index(0)
    ids = encoding.ids
    own, before = ids[begin:end], ids[:begin]
    return own if own[:begin] == before else before + own


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder. Raises `ConfigError` if a file or the eos id is missing."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model.path={model_dir}: no tokenizer.json in it; name a Hugging Face model folder")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ConfigError(
            f"model.path={model_dir}: tokenizer.json cannot be read ({error}); mend the file"
        ) from None
    return Tokenizer(backend, eos_ids=_read_eos_ids(model_dir))


class _Model(msgspec.Struct):
    unk_token: str | None = None
    unk_id: int | None = None  # of a model that has no `unk_token`
    byte_fallback: bool = False


class _Written(msgspec.Struct):
    model: _Model


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _read_eos_ids(model_dir: Path) -> tuple[int, ...]:
    """From generation_config.json, which may list more of them, else from config.json."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if not path.is_file():
            continue
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Ends).eos_token_id
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.path={model_dir}: {name} cannot be read ({error}); mend the file") from None
        if found is not None and found != []:
            return (found,) if isinstance(found, int) else tuple(found)
    raise ConfigError(
        f"model.path={model_dir}: no eos_token_id in its config.json; add the id that ends a response"
    )
