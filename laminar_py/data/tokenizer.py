"""The tokenizer of a model folder: text to token ids and back, and the ids that end a response.

The controller encodes prompts when a run starts, and scorers decode responses for the reward. Tokens of an engine
are never decoded and encoded again. A prompt gets the ids that transformers gives it with the same
`tokenizer.json`, but no end of sequence and at most one beginning of sequence (`tests/data/test_tokenizer.py`).
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import tokenizers

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import IntArray
from laminar_py.records.reasoning import TAGS

PREFIXES = ("\n", ".", "0", "a")  # texts that rarely merge with a text behind them
ADDS_SPACE = re.compile(
    r"Prepend\(|prepend_scheme=(?:first|always)|add_prefix_space=True"
)  # in a tokenizer's repr
PROBE = "laminarlaminar"  # a text to look at a tokenizer or a template with
MOST_GROWTH = 3  # factor by which NFC composition may increase the bytes of a text


class Tokenizer:
    """Encodes prompts and responses, decodes responses. Each of `eos_ids` ends a response; data use the first.

    With the quickstart's word-level tokenizer `encode_prompt("e-2;o*7;1x5?")` has 7 ids and `eos_ids` is `(1,)`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, eos_ids: tuple[int, ...]) -> None:
        backend.no_truncation()  # a file may ask for truncation or padding, which no prompt gets
        backend.no_padding()
        self._backend = backend
        self._num_added = backend.num_special_tokens_to_add(False)
        self._is_byte_level = _is_byte_level(backend)
        self._unknown = None if self._is_byte_level else _unknown_id(backend)
        self._adds_space = ADDS_SPACE.search(f"{backend.normalizer!r} {backend.pre_tokenizer!r}") is not None
        added = backend.get_added_tokens_decoder()
        self._special = {id: token.content for id, token in added.items() if token.special}
        self._added_texts = sorted((token.content for token in added.values()), key=len, reverse=True)
        self.eos_ids = eos_ids

    @property
    def num_ids(self) -> int:
        """The highest id plus one, with the ids of added tokens."""
        return 1 + max(self.vocabulary.values())

    @property
    def vocabulary(self) -> dict[str, int]:
        """Id of each token, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(self._special)

    def with_ends(self, first: tuple[int, ...]) -> "Tokenizer":
        """Return a copy that has the ids `first` in front of its other `eos_ids`."""
        return Tokenizer(self._backend, eos_ids=tuple(dict.fromkeys((*first, *self.eos_ids))))

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens, the longest first."""
        return tuple(sorted(self._special.values(), key=len, reverse=True))

    def first_special(self, text: str) -> tuple[int, ...]:
        """Return the id of the first special token in a text, as a tuple; () without a special token."""
        return tuple(id for id in self.encode(text).tolist() if id in self._special)[:1]

    def encode(self, text: str) -> IntArray:
        """Encode a text to [n] ids, without a beginning of sequence."""
        return np.array(self._encoding(text, begun=False).ids, dtype=np.int32)

    def encode_next(self, text: str, *, after: str = "", literal: bool = False) -> IntArray:
        """Encode a text that continues a sequence, e.g. the text `after`, to [n] ids; see `encode_literal`.

        Some tokenizers put a space before a text, so the text stands behind a prefix, whose ids are taken off.
        """
        encode = self.encode_literal if literal else self.encode
        if self._adds_space and not self._is_kept_apart(after):
            for prefix in PREFIXES:
                whole, before = encode(prefix + text), encode(prefix)  # no space, if the two do not merge
                if len(before) and np.array_equal(whole[: len(before)], before):
                    return whole[len(before) :]
        return encode(text)

    def _is_kept_apart(self, after: str) -> bool:
        """Return whether `after` ends in an added token behind which a text has the ids that it has alone."""
        token = next((token for token in self._added_texts if after.endswith(token)), None)
        return token is not None and np.array_equal(self.encode(token + PROBE)[1:], self.encode(PROBE))

    def encode_literal(self, text: str) -> IntArray:
        """Encode a text to [n] ids; the name of a special token in it becomes ordinary tokens."""
        (encoding,) = self._literal.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that reads names of special tokens as ordinary text."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def encode_prompt(self, text: str) -> IntArray:
        """Encode a text to [n] ids, behind the ids that the tokenizer's post-processor puts first, e.g. a BOS.

        A text that begins with these tokens, e.g. by a chat template, gets them once. An empty text has no ids.
        """
        return np.array(_with_beginning(self._encoding(text, begun=True)), dtype=np.int32)

    def _encoding(self, text: str, *, begun: bool) -> tokenizers.Encoding:
        """Encode a text, with the post-processor's tokens if `begun`; without offsets, in half the time."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=begun)
        return encoding

    def count(self, texts: Sequence[str], *, begun: bool) -> list[int]:
        """Count the ids that `encode_prompt` (if `begun`) or else `encode` gives each text."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=begun)
        return [len(_with_beginning(encoding)) if begun else len(encoding) for encoding in encodings]

    def max_ids(self, text: str) -> int | None:
        """Return an upper bound on the ids of a text, from its bytes; None if the tokenizer is not byte-level.

        A byte-level tokenizer makes at least one id of a text that is not empty.
        """
        if not self._is_byte_level:
            return None
        num_bytes = len(text) if text.isascii() else MOST_GROWTH * len(text.encode())
        return 2 * num_bytes + 1 + self._num_added  # the tokenizer may add a space before each stretch

    @property
    def has_unknown(self) -> bool:
        """True if the tokenizer turns words outside its vocabulary into an unknown token."""
        return self._unknown is not None

    def unknown_words(self, text: str) -> list[str]:
        """Return the words of a text that become the unknown token, except the text of that token."""
        if self._unknown is None:
            return []
        encoding = self._backend.encode(text, add_special_tokens=False)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        words = [text[begin:end] for id, (begin, end) in spans if id == self._unknown]
        return [word for word in words if word != self.word(self._unknown)]

    def word(self, id: int) -> str:
        """Return the token of an id as text; "" for an unused id."""
        return self._backend.id_to_token(id) or ""

    def decode(self, ids: IntArray, *, special: bool = False) -> str:
        """Decode [n] `ids` to text; leave out special tokens, such as the end, unless `special` is True."""
        kept = ids.tolist() if special else [id for id in ids.tolist() if self._special.get(id, TAGS[0]) in TAGS]
        return self._backend.decode(kept, skip_special_tokens=False)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a tokenizer encodes the UTF-8 bytes of a text, as they are or after NFC composition."""
    steps = repr(backend.pre_tokenizer)
    unchanged = backend.normalizer is None or isinstance(backend.normalizer, tokenizers.normalizers.NFC)
    return unchanged and "ByteLevel" in steps and "Metaspace" not in steps


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return the id of the unknown token; None without one, or if unknown words become bytes."""
    model = msgspec.json.decode(backend.to_str())["model"]
    if model.get("byte_fallback"):
        return None
    token = model.get("unk_token")
    return model.get("unk_id") if token is None else backend.token_to_id(token)  # Unigram has the id alone


def _with_beginning(encoding: tokenizers.Encoding) -> list[int]:
    """Return the post-processor's first ids once, then the ids of the text; [] for an empty text."""
    added = encoding.special_tokens_mask  # 1 on ids that the post-processor adds before, between and behind
    if 0 not in added:
        return []
    begin, end = added.index(0), len(added) - added[::-1].index(0)
    ids = encoding.ids
    text_ids, added_ids = ids[begin:end], ids[:begin]
    return text_ids if text_ids[:begin] == added_ids else added_ids + text_ids


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face model folder. Raises `ConfigError` without files or an eos id."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model.path={model_dir}: no tokenizer.json in it; name a Hugging Face model folder")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ConfigError(
            f"model.path={model_dir}: tokenizer.json cannot be read ({error}); fix the file"
        ) from None
    return Tokenizer(backend, eos_ids=_read_eos_ids(model_dir, backend))


def vocabulary_fault(folder: Path, tokenizer: Tokenizer) -> str | None:
    """Say how the tokens of the tokenizer in a model folder differ from `tokenizer`; None if ids mean the same."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        return f"its tokenizer.json cannot be read ({' '.join(str(error).split())})"
    own, other = tokenizer.vocabulary, backend.get_vocab(with_added_tokens=True)
    if differing := own.items() ^ other.items():
        token, id = min(differing, key=lambda pair: (pair[1], pair[0]))
        return f"its tokenizer differs at id {id}: {token!r} is in one of the two alone"
    added = backend.get_added_tokens_decoder().items()
    if others := tokenizer.special_ids ^ {id for id, token in added if token.special}:
        return f"its tokenizer differs in the special tokens: id {min(others)} is one in one of the two alone"
    return None


class _NamedToken(msgspec.Struct):
    content: str


class _ConfigFile(msgspec.Struct):
    """Fields of generation_config.json, config.json and tokenizer_config.json that are read."""

    eos_token_id: int | list[int] | None = None
    eos_token: str | _NamedToken | None = None  # of tokenizer_config.json


def _read_config(model_dir: Path, name: str) -> _ConfigFile:
    """Read a config file of a model folder; without the file, all fields are None. Raises `ConfigError`."""
    try:
        return msgspec.json.decode((model_dir / name).read_bytes(), type=_ConfigFile)
    except FileNotFoundError:
        return _ConfigFile()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path={model_dir}: {name} cannot be read ({error}); fix the file") from None


def _read_eos_ids(model_dir: Path, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Read end-of-sequence ids of generation_config.json or config.json, and the tokenizer's own, for turns."""
    end = _read_config(model_dir, "tokenizer_config.json").eos_token
    text = end.content if isinstance(end, _NamedToken) else end
    own = None if text is None else backend.token_to_id(text)  # None for a text that is no token
    for name in ("generation_config.json", "config.json"):
        eos = _read_config(model_dir, name).eos_token_id
        if eos is not None and eos != []:
            ids = [eos] if isinstance(eos, int) else eos
            return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))
    raise ConfigError(
        f"model.path={model_dir}: no eos_token_id in its generation_config.json or config.json; add the id that"
        " ends a response"
    )
