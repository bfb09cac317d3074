"""Token ids of a response as texts, one for each. Called by `reading`.

Invariant: the texts of a response's tokens, joined, are its text as the tokenizer decodes it, special tokens
included, whatever kind of tokenizer that is. Exact to the token for byte-level vocabularies, words and
SentencePiece; where another decoder rewrites what it joins, the bounds between tokens are as near as lengths tell.
"""

import codecs
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate, groupby, pairwise

import numpy as np

from laminar_py.data.tokenizer import Tokenizer
from laminar_py.records.codec import IntArray

_BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}  # of SentencePiece


def token_texts(tokenizer: Tokenizer, ids: IntArray) -> list[str]:
    """[L] texts of the tokens `ids`; the bytes of a character stand with the token that completes it.

    Bytes that are no character are the replacement character. E.g. the three tokens of "é!" whose first two are
    its bytes have the texts `["", "é", "!"]`.
    """
    whole = tokenizer.decode(ids, special=True)
    texts = _read_bytes(_bytes_of(tokenizer.word(id)) for id in ids.tolist())
    if "".join(texts) == whole:
        return texts
    ends = list(accumulate(map(len, _decode_apart(tokenizer, ids.tolist()))))
    return [whole[start:end] for start, end in pairwise((0, *ends[:-1], len(whole)))]


def _read_bytes(tokens: Iterable[bytes]) -> list[str]:
    """Text that each token completes of UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(token) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def _bytes_of(word: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary, in which each byte is written as a character of its own."""
    try:
        return bytes(_byte_characters()[character] for character in word)
    except KeyError:  # an added token, which stands for itself
        return word.encode()


@cache
def _byte_characters() -> dict[str, int]:
    """Bytes by their characters (GPT-2): what prints stands for itself, the others follow from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _decode_apart(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    """Text of each token, decoded behind the one before it; byte tokens in a row are decoded together."""

    @cache
    def text(*tokens: int) -> str:
        return tokenizer.decode(np.array(tokens, np.int32), special=True)

    before: tuple[int, ...] = ()
    for is_bytes, found in groupby(ids, key=lambda id: tokenizer.word(id) in _BYTE_TOKENS):
        row = list(found)
        for unit in [tuple(row)] if is_bytes else [(id,) for id in row]:
            added = text(*before, *unit)[len(text(*before)) :]
            yield from _share(tokenizer, unit, added) if is_bytes else [added]
            before = unit


def _share(tokenizer: Tokenizer, unit: tuple[int, ...], text: str) -> list[str]:
    """Parts of the text of byte tokens in a row, all of which are replacement characters where one is broken."""
    texts = _read_bytes(bytes([_BYTE_TOKENS[tokenizer.word(id)]]) for id in unit)
    return (
        texts
        if "".join(texts) == text
        else list(text)
        if len(text) == len(unit)
        else [""] * (len(unit) - 1) + [text]
    )
