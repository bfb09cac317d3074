"""Demonstrations: prompts with the responses to imitate, as a kind of warm start reads them."""

from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from laminar_py.data.sources import DataSource
from laminar_py.records.codec import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt with its response, e.g. of row 6: ids of `2+2=`, and of `4` with the end of sequence."""

    row: int  # of its source
    prompt: str  # text of `prompt_ids`
    response: str
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L] the last is the end of sequence

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens, P + L."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Demonstrations and their source, e.g. the 7,800 of warm_start.jsonl."""

    source: DataSource
    all: list[Demonstration]
    max_tokens: int  # limit of a run for each

    @property
    def digest(self) -> str:
        """Digest of all prompts and responses."""
        digest = blake2b(digest_size=16)
        for one in self.all:
            digest.update(msgspec.msgpack.encode((one.prompt, one.response)))
        return digest.hexdigest()
