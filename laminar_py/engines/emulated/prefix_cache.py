"""Prefixes that stay in the KV cache of an emulated engine. Pure; owned by `scheduler`.

As in a radix cache they have the room that running requests leave, and those that were used longest ago make room.
Invariant: what is kept was computed by the weights in use.
"""


class PrefixCache:
    """Tokens of requests that have left, each by its id, until another takes their place."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}  # by id, the longest unused first; each counts its prompt in full
        self._num_tokens = 0

    def keep(self, rid: str, num_tokens: int) -> None:
        """Keep what a request has left."""
        self.take(rid)
        self._kept[rid] = num_tokens
        self._num_tokens += num_tokens

    def take(self, rid: str) -> int:
        """Tokens that are there of a request which runs again, and holds them itself from here on."""
        num_tokens = self._kept.pop(rid, 0)
        self._num_tokens -= num_tokens
        return num_tokens

    def shrink(self, room: int) -> None:
        """Have at most so many tokens stay."""
        while self._num_tokens > room:
            self.take(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget all, since the weights are others now."""
        self._kept.clear()
        self._num_tokens = 0
