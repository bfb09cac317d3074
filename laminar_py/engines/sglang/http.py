"""Connection to one SGLang server over HTTP: calls, streams of chunks, and the loss of it. Called by `engine`.

Invariant: once the server is lost every call and stream raises the same `EngineLostError`, those under way too.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import aiohttp
import msgspec

import laminar_py.engines.sglang.wire as wire
from laminar_py.records.engine import EngineLostError, RefusedError

log = logging.getLogger(__name__)
T = TypeVar("T")


def headers(api_key: str | None) -> dict[str, str]:
    """Headers of every request: its body is JSON, if it has one."""
    json = {"Content-Type": "application/json"}
    return {**json, "Authorization": f"Bearer {api_key}"} if api_key else json


class CutOffError(Exception):
    """A stream that had begun broke off."""


class Connection:
    """To the server at `url`, e.g. `Connection("http://127.0.0.1:30000", api_key=key, timeout_s=60)`."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self.timeout_s = timeout_s  # longest wait for an answer
        self._session = aiohttp.ClientSession(
            # a connection of its own for each request: the server closes idle ones just when they are used again
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s),
            headers=headers(api_key),
            read_bufsize=2**20,
        )
        self._loop = asyncio.get_running_loop()
        self._lost: EngineLostError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._responses: set[aiohttp.ClientResponse] = set()  # streams under way
        self.ended = asyncio.Event()  # set when it is lost
        self.heard_s = self._loop.time()  # when a stream last brought anything

    @property
    def is_lost(self) -> bool:
        """True once the server is of no use any more."""
        return self._lost is not None

    @property
    def silent_s(self) -> float:
        """Seconds since any stream brought anything."""
        return self._loop.time() - self.heard_s

    def touch(self) -> None:
        """Silence counts from now on."""
        self.heard_s = self._loop.time()

    async def close(self) -> None:
        """End everything; the server stays."""
        self._end("closed")
        assert self._closing is not None, "it has ended"
        await self._closing

    def lose(self, reason: str) -> EngineLostError:
        """The first reason counts; what is under way ends."""
        if self._lost is None:
            log.warning("server %s: %s", self._url, reason)
        return self._end(reason)

    def _end(self, reason: str) -> EngineLostError:
        if self._lost is None:
            self._lost = EngineLostError(f"server {self._url}: {reason}")
            self.ended.set()
            for response in self._responses:
                response.content.set_exception(self._lost)
            self._closing = self._loop.create_task(self._session.close(), name="close-connections")
        return self._lost

    def raise_if_lost(self) -> None:
        """Raise the one `EngineLostError`, if it is lost."""
        if self._lost is not None:
            raise self._lost

    async def post(self, name: str, **body: object) -> None:
        """Call by POST. `RefusedError` if the server refuses it, `EngineLostError` if it fails."""
        await self._call("POST", name, body)

    async def ask(self, name: str, answer: type[T], *, limit_s: float | None = None, **body: object) -> T:
        """The decoded answer of a POST, which may take `limit_s` where that is given; raises as `post`."""
        return self._decode(name, await self._call("POST", name, body, limit_s), answer)

    async def get(self, name: str, answer: type[T]) -> T:
        """The decoded answer of a GET; raises as `post`."""
        return self._decode(name, await self._call("GET", name, None), answer)

    async def _call(
        self, method: str, name: str, body: dict[str, object] | None, limit_s: float | None = None
    ) -> bytes:
        self.raise_if_lost()
        limit_s = self.timeout_s if limit_s is None else limit_s
        content = None if body is None else msgspec.json.encode(body)
        with self._losing(f"{name} failed"):
            try:
                async with (
                    asyncio.timeout(limit_s),
                    self._session.request(method, f"{self._url}/{name}", data=content) as response,
                ):
                    data, status = await response.read(), response.status
            except TimeoutError:
                raise self.lose(f"no answer to {name} in {limit_s:g} s") from None
        if 400 <= status < 500:
            raise RefusedError(f"{name} was refused with {status}: {_excerpt(data)}")
        if status != 200:
            raise self.lose(f"answered {status} to {name}: {_excerpt(data)}")
        return data

    def _decode(self, name: str, data: bytes, answer: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.lose(f"answered nonsense to {name} ({error}): {_excerpt(data)}") from None

    async def chunks(self, rid: str, body: dict[str, object]) -> AsyncIterator[wire.StreamEvent]:
        """The chunks of one `/generate` to its end. `RefusedError` if the server refuses it.

        Raises `CutOffError` if they break off: the server is gone, or has failed over this one alone.
        """
        self.raise_if_lost()
        splitter = wire.EventSplitter()
        with self._losing(f"the stream of {rid} broke"):
            async with await self._open(body) as response:
                if response.status != 200:
                    raise self.fault(rid, response.status, _excerpt(await response.read()))
                self._responses.add(response)
                try:
                    async for data in response.content.iter_any():
                        self.touch()
                        for payload in splitter.feed(data):
                            yield wire.decode_chunk(payload)
                except wire.WireError as error:
                    raise self.lose(f"sent {error}") from None
                except aiohttp.ClientPayloadError as error:
                    raise CutOffError(f"the stream of {rid} broke: {_words(error)}") from error
                finally:
                    self._responses.discard(response)

    async def _open(self, body: dict[str, object]) -> aiohttp.ClientResponse:
        """The beginning of an answer, or `EngineLostError` as soon as the server is lost."""
        content = msgspec.json.encode(body)
        opening = asyncio.ensure_future(self._session.post(f"{self._url}/generate", data=content))
        ending = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait((opening, ending), return_when=asyncio.FIRST_COMPLETED)
            self.raise_if_lost()
            return opening.result()
        finally:
            ending.cancel()
            opening.cancel()

    @contextmanager
    def _losing(self, what: str) -> Iterator[None]:
        """A connection that breaks loses the server."""
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            raise self.lose(f"{what}: {_words(error)}") from error
        except RuntimeError:  # aiohttp's word for a session that is closed
            self.raise_if_lost()
            raise

    def fault(self, rid: str, code: int | str | None, message: str) -> Exception:
        """Error of a refused request: the fault is the request's, or the server is lost."""
        if code in (400, "400"):
            return RefusedError(f"rid={rid}: the server refuses it: {message}")
        return self.lose(f"answered {code} to {rid}: {message}")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _excerpt(data: bytes) -> str:
    return data[:200].decode(errors="replace")
