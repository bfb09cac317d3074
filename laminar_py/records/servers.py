"""Addresses of servers that terms of a reward ask, as scorers are told of them."""

import msgspec


class ServerAddress(msgspec.Struct, frozen=True):
    """A server, e.g. `ServerAddress("http://10.0.0.4:30000", "8f2c...")`; without a key it lets all in."""

    url: str
    key: str | None = None

    def __repr__(self) -> str:
        return self.url  # a key is for nobody's log


class PoolAddresses(msgspec.Struct, frozen=True):
    """Servers that are up, by pool; of two of these the higher number is the newer."""

    number: int
    pools: dict[str, list[ServerAddress]]
