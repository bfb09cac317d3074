"""Finished responses by prompt, within bounds on memory and age. Owned by `drafts`, which continues them.

It holds tokens alone, from their first use on as strings with a character for each (`characters`): a look-up scans
the few responses of one prompt, so no index costs memory beside them.
"""

from collections import OrderedDict
from dataclasses import dataclass

from laminar_py.records.codec import IntArray

MOST_BYTES = 64 * 2**20  # of memory for all responses of an engine
RESPONSE_BYTES = 768  # of memory for one response beside its tokens, at most; a test measures it
MOST_RESPONSES = 16  # of one prompt
OLDEST = 1000  # versions since a response was sampled, after which it is dropped: some epochs of a small data set
LEAST_TOKENS = 4  # of a response that is kept; the run's probes have one


@dataclass(slots=True)
class KeptResponse:
    """A finished response, e.g. `KeptResponse(prompt, ids, 7)`."""

    prompt: bytes  # digest
    tokens: IntArray | str  # many prompts never come again, so the string waits for its first use
    version: int  # weights that sampled its last token

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, at most."""
        return 4 * len(self.tokens) + RESPONSE_BYTES

    def text(self) -> str:
        """Return its string."""
        if not isinstance(self.tokens, str):
            self.tokens = characters(self.tokens)
        return self.tokens


class Corpus:
    """The newest responses of each prompt; beyond `most_bytes` the oldest response goes first."""

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self.num_bytes = 0  # other threads read it
        self._most_bytes = most_bytes
        self._oldest = 0  # version that is not stale
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()  # by request, the oldest first
        self._by_prompt: dict[bytes, list[str]] = {}  # requests, the oldest first

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, prompt: bytes) -> bool:
        """Whether a response to a prompt by its digest is kept."""
        return prompt in self._by_prompt

    def has_response(self, rid: str) -> bool:
        """Whether the response of a request is kept."""
        return rid in self._kept

    def of(self, prompt: bytes) -> list[str]:
        """Return the responses to a prompt by its digest, the oldest first."""
        return [self._kept[rid].text() for rid in self._by_prompt.get(prompt, ())]

    def add(self, rid: str, prompt: bytes, ids: IntArray, *, version: int) -> None:
        """Keep the response of a request under `version`, in place of its earlier turns."""
        self._drop(rid)
        if len(ids) < LEAST_TOKENS or version < self._oldest:
            return
        of_prompt = self._by_prompt.setdefault(prompt, [])
        if len(of_prompt) == MOST_RESPONSES:
            self._drop(of_prompt[0])
        kept = self._kept[rid] = KeptResponse(prompt, ids, version)
        of_prompt.append(rid)
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def drop_stale(self, version: int) -> None:
        """Drop responses that are more than `OLDEST` versions older than `version`, and take no such ones."""
        self._oldest = version - OLDEST
        while self._kept and self._kept[rid := next(iter(self._kept))].version < self._oldest:
            self._drop(rid)

    def _drop(self, rid: str) -> None:
        """Drop a request's response, if it is kept."""
        if (kept := self._kept.pop(rid, None)) is None:
            return
        self.num_bytes -= kept.num_bytes
        of_prompt = self._by_prompt[kept.prompt]
        of_prompt.remove(rid)
        if not of_prompt:
            del self._by_prompt[kept.prompt]


def characters(ids: IntArray) -> str:
    """Return a string with the character of each of `ids [n]`, which are below 0x110000."""
    return ids.astype("<i4", copy=False).tobytes().decode("utf-32-le", "surrogatepass")
