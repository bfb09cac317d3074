"""Text to token ids and back, with the model folder's own tokenizer. Owns the end-of-sequence ids.

The controller encodes prompts when a run starts, scorers decode responses for the reward; nothing that an engine
generated is ever encoded again. Invariant: a prompt has the ids that transformers makes of it from the same
`tokenizer.json`, but for an end of sequence, or a second beginning of one.
"""

from pathlib import Path

import msgspec
import numpy as np
import tokenizers

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import IntArray


class Tokenizer:
    """Encodes prompts and responses, decodes responses. `eos_ids` end a response; the first is the usual one.

    With the quickstart's word-level tokenizer `encode_prompt("e-2;o*7;1x5?")` has 7 ids and `eos_ids` is `(1,)`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, eos_ids: tuple[int, ...]) -> None:
        backend.no_truncation()  # a file may ask for either, and a prompt is neither cut nor filled
        backend.no_padding()
        self._backend = backend
        self.eos_ids = eos_ids

    @property
    def num_ids(self) -> int:
        """Number of ids, added tokens included: one more than the highest."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> IntArray:
        """[n] token ids of `text`, none added."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_prompt(self, text: str) -> IntArray:
        """[n] token ids of `text` after those with which the tokenizer's post-processor begins a text.

        A text that is written with them, as chat templates do, has them once. Without a token of its own it has
        none at all.
        """
        encoding = self._backend.encode(text, add_special_tokens=True)
        added = encoding.special_tokens_mask  # 1 for what the post-processor adds before, between and behind
        if 0 not in added:
            return np.array([], dtype=np.int32)
        begin, end = added.index(0), len(added) - added[::-1].index(0)
        own = encoding.ids[begin:end]
        before = encoding.ids[:begin]
        return np.array(own if own[:begin] == before else before + own, dtype=np.int32)

    def decode(self, ids: IntArray) -> str:
        """Text of [n] `ids`; special tokens, the end of sequence among them, leave nothing."""
        return self._backend.decode(ids.tolist(), skip_special_tokens=True)


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
