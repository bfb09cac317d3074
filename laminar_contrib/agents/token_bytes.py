"""Bytes of single tokens, as log-probabilities of a chat completion have them. The endpoint uses `TokenBytes`.

A token may be part of a character, so its text alone does not say its bytes. The bytes of a turn's tokens, joined,
are the bytes of its text (`tests/environment/agents/test_token_bytes.py`).
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from laminar_py.records.codec import IntArray

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of byte fallback


class TokenBytes:
    """Finds the bytes of tokens, e.g. `TokenBytes(model, decode_turn)(ids)`.

    It reads the tokenizer at the first call. `decode_turn` gives the text of tokens without the end of a turn.
    """

    def __init__(self, model: Path, decode_turn: Callable[[IntArray], str]) -> None:
        self._model = model
        self._decode_turn = decode_turn

    def __call__(self, turn: IntArray) -> list[bytes]:
        """Return the bytes of each of [n] tokens of a turn; the token that ends a turn has none."""
        ids = turn.tolist()
        found = [self._bytes_of(ids, place) for place in range(len(ids))]
        has_end = found and found[-1].strip() and not self._decode_turn(turn[-1:])
        return [*found[:-1], b""] if has_end else found

    def _bytes_of(self, ids: Sequence[int], place: int) -> bytes:
        """Return the bytes of one token of a turn; its text may depend on the token before it."""
        token = self._tokenizer.id_to_token(ids[place])
        if token is None:
            return b""
        if ids[place] not in self._added:
            if self._is_byte_level and all(letter in BYTE_LETTERS for letter in token):
                return bytes(BYTE_LETTERS[letter] for letter in token)
            if self._falls_back and (byte := BYTE.fullmatch(token)):
                return bytes.fromhex(byte[1])
        before = self._decode(ids[max(0, place - 1) : place])
        return self._decode(ids[max(0, place - 1) : place + 1]).removeprefix(before).encode()

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_file(str(self._model / "tokenizer.json"))

    @cached_property
    def _added(self) -> frozenset[int]:
        """Ids of added tokens, whose text stands for itself."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self._tokenizer.decoder)

    @cached_property
    def _falls_back(self) -> bool:
        return "ByteFallback" in repr(self._tokenizer.decoder)


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter in which byte-level tokenizers write bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()
