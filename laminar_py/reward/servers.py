"""Servers that a term asks over HTTP: each call goes to the least busy; what is transient is told apart."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from laminar_py.config.reward import ServeContext
from laminar_py.config.section import ConfigError
from laminar_py.records.scoring import NoValueError, TryAgainError

BUSY = {408, 425, 429, 500, 502, 503, 504}
T = TypeVar("T")


class Servers:
    """Base URLs that answer alike."""

    def __init__(self, urls: Sequence[str], session: aiohttp.ClientSession) -> None:
        self._session = session
        self._calls = dict.fromkeys(urls, 0)

    async def ask(self, path: str, body: Mapping[str, object], answer: type[T]) -> T:
        """The answer to a POST. Raises `TryAgainError` where another may succeed, else `NoValueError`."""
        base = min(self._calls, key=lambda url: self._calls[url])
        url = f"{base.rstrip('/')}/{path}"
        self._calls[base] += 1
        try:
            async with self._session.post(url, data=msgspec.json.encode(body)) as reply:
                content = await reply.read()
        except TimeoutError:
            raise TryAgainError(f"{url}: no answer in reward.timeout_s") from None
        except aiohttp.ClientError as error:
            raise TryAgainError(f"{url}: {error!r}") from error
        finally:
            self._calls[base] -= 1
        if reply.status in BUSY:
            raise TryAgainError(f"{url}: status {reply.status}")
        if reply.status != 200:
            raise NoValueError(f"{url}: status {reply.status}: {content[:200].decode(errors='replace')}")
        try:
            return msgspec.json.decode(content, type=answer)
        except msgspec.DecodeError as error:
            raise NoValueError(f"{url}: another answer than expected ({error})") from error


@asynccontextmanager
async def open_servers(urls: Sequence[str], key: str | None, context: ServeContext) -> AsyncIterator[Servers]:
    """Servers while connections to them are open; `key` names the variable with what lets us in.

    Raises `ConfigError` where there is no such variable.
    """
    if key is not None and key not in context.env:
        raise ConfigError(f"key={key}: no such variable among reward.env; set it and name it there")
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {context.env[key]}"
    limit = aiohttp.ClientTimeout(total=context.timeout_s)
    async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
        yield Servers(urls, session)


def check_urls(urls: Sequence[str]) -> None:
    """Refuse what is no URL."""
    wrong = next((url for url in urls if not url.startswith(("http://", "https://"))), None)
    if wrong is not None:
        raise ConfigError(f"urls={wrong}: no URL; write for example http://10.0.0.4:30000")
