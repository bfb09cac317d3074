"""HTTP connection to one SGLang server: calls, streams of chunks, and the loss of the server. Called by `engine`.

Once the server is lost, every call and stream, also those in flight, raises the same `EngineLostError`
(`tests/engines/sglang/test_faults.py`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import aiohttp
import msgspec

from laminar_py.engines.sglang.wire import EventSplitter, StreamEvent, WireError, decode_chunk
from laminar_py.records.engine import EngineLostError, RefusedError
from laminar_py.records.patience import Patience

log = logging.getLogger(__name__)
T = TypeVar("T")


def headers(api_key: str | None) -> dict[str, str]:
    """HTTP headers of every request: JSON content, and the key if there is one."""
    json = {"Content-Type": "application/json"}
    return {**json, "Authorization": f"Bearer {api_key}"} if api_key else json


class CutOffError(Exception):
    """A stream broke after the server had sent the start of its answer."""


class ServerConnection:
    """A connection to the server at `url`. It follows no redirects, so that the key goes to no other server.

    Until the first token a call may take `first_timeout_s`: a server compiles kernels in its first requests, and
    its scheduler answers nothing meanwhile (`records.patience`).

    E.g. `ServerConnection("http://127.0.0.1:30000", api_key=key, timeout_s=60, first_timeout_s=900)`.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float, first_timeout_s: float = 0.0) -> None:
        self._url = url.rstrip("/")
        self._patience = Patience(timeout_s, first_s=first_timeout_s)
        self._session = aiohttp.ClientSession(
            # one connection per request, since the server closes idle connections just as they are reused
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s),
            headers=headers(api_key),
            read_bufsize=2**20,
        )
        self._loop = asyncio.get_running_loop()
        self._lost: EngineLostError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._responses: set[aiohttp.ClientResponse] = set()  # of streams in flight
        self.ended = asyncio.Event()  # set when the server is lost
        self._last_bytes_s = self._loop.time()  # time of the last bytes from any stream

    @property
    def timeout_s(self) -> float:
        """Longest wait for an answer or a token, seconds."""
        return self._patience.present_s

    @property
    def has_served(self) -> bool:
        """True from the first token on."""
        return self._patience.has_answer

    @property
    def is_lost(self) -> bool:
        """True once the server is lost or the connection closed."""
        return self._lost is not None

    @property
    def silent_s(self) -> float:
        """Seconds since the last bytes from any stream, or the last `touch`."""
        return self._loop.time() - self._last_bytes_s

    def touch(self) -> None:
        """Set `silent_s` to 0."""
        self._last_bytes_s = self._loop.time()

    def _note_token(self) -> None:
        """Note that a stream sends tokens. At the first token the waits of calls in flight become shorter."""
        self.touch()
        self._patience.note_answer()

    async def close(self) -> None:
        """End all calls and streams, and wait until the connections are closed. The server keeps running.

        Later calls raise `EngineLostError`, as after `lose`.
        """
        self._end("closed")
        assert self._closing is not None, "`_end` starts to close the session"
        await self._closing

    def lose(self, reason: str) -> EngineLostError:
        """Mark the server as lost, and end calls and streams in flight. Returns the error of the first loss."""
        if self._lost is None:
            log.warning("server %s: %s", self._url, reason)
        return self._end(reason)

    def _end(self, reason: str) -> EngineLostError:
        """Fail calls and streams with an `EngineLostError`, close the session, and return the first such error."""
        if self._lost is None:
            self._lost = EngineLostError(f"server {self._url}: {reason}")
            self.ended.set()
            for response in self._responses:
                response.content.set_exception(self._lost)
            self._closing = self._loop.create_task(self._session.close(), name="close-connections")
        return self._lost

    def raise_if_lost(self) -> None:
        """Raise the `EngineLostError` of the loss, if the server is lost."""
        if self._lost is not None:
            raise self._lost

    async def post(self, name: str, **body: object) -> None:
        """Send a POST to path `name`. `RefusedError` if the server refuses it, `EngineLostError` if it fails."""
        await self._call("POST", name, body)

    async def post_and_decode(
        self, name: str, answer: type[T], *, limit_s: float | None = None, **body: object
    ) -> T:
        """Send a POST and decode its answer. The server has `limit_s` seconds, by default `timeout_s`.

        Raises `RefusedError` if the server refuses it, `EngineLostError` if it fails or the answer is invalid.
        """
        return self._decode(name, await self._call("POST", name, body, limit_s), answer)

    async def get(self, name: str, answer: type[T]) -> T:
        """Send a GET and decode its answer. Raises as `post_and_decode`."""
        return self._decode(name, await self._call("GET", name, None), answer)

    async def _call(
        self, method: str, name: str, body: dict[str, object] | None, limit_s: float | None = None
    ) -> bytes:
        """Send a request and return the body of its answer.

        Raises `RefusedError` for a status of 4xx. Any other failure or a timeout marks the server as lost, and
        raises `EngineLostError`.
        """
        self.raise_if_lost()
        content = None if body is None else msgspec.json.encode(body)
        with self._losing(f"{name} failed"):
            try:
                async with (
                    self._patience.timer() if limit_s is None else asyncio.timeout(limit_s),
                    self._session.request(
                        method, f"{self._url}/{name}", data=content, allow_redirects=False
                    ) as response,
                ):
                    data, status = await response.read(), response.status
            except TimeoutError:
                raise self.lose(f"no answer to {name} in {limit_s or self.timeout_s:g} s") from None
        if 400 <= status < 500:
            raise RefusedError(f"{name} was refused with {status}: {_excerpt(data)}")
        if status != 200:
            raise self.lose(f"answered {status} to {name}: {_excerpt(data)}")
        return data

    def _decode(self, name: str, data: bytes, answer: type[T]) -> T:
        """Decode the answer to call `name`. An invalid answer marks the server as lost: `EngineLostError`."""
        try:
            return msgspec.json.decode(data, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.lose(f"sent an invalid answer to {name} ({error}): {_excerpt(data)}") from None

    async def chunks(self, rid: str, body: dict[str, object]) -> AsyncIterator[StreamEvent]:
        """Send `/generate` and yield the chunks of its stream. `RefusedError` if the server refuses it.

        Raises `CutOffError` if the stream breaks: the server has crashed, or failed on this request alone.
        """
        self.raise_if_lost()
        splitter = EventSplitter()
        with self._losing(f"the stream of {rid} broke"):
            async with await self._open(body) as response:
                if response.status != 200:
                    raise self.fault(rid, response.status, _excerpt(await response.read()))
                self._responses.add(response)
                try:
                    async for data in response.content.iter_any():
                        self._note_token()
                        for payload in splitter.feed(data):
                            yield decode_chunk(payload)
                except WireError as error:
                    raise self.lose(f"sent {error}") from None
                except aiohttp.ClientPayloadError as error:
                    raise CutOffError(f"the stream of {rid} broke: {_words(error)}") from error
                finally:
                    self._responses.discard(response)

    async def _open(self, body: dict[str, object]) -> aiohttp.ClientResponse:
        """Send `/generate` and await the start of its answer. `EngineLostError` once the server is lost."""
        content = msgspec.json.encode(body)
        opening = asyncio.ensure_future(
            self._session.post(f"{self._url}/generate", data=content, allow_redirects=False)
        )
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
        """If the connection breaks in this block, mark the server as lost by `what`: `EngineLostError`."""
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            raise self.lose(f"{what}: {_words(error)}") from error
        except RuntimeError:  # aiohttp raises it on a closed session
            self.raise_if_lost()
            raise

    def fault(self, rid: str, code: int | str | None, message: str) -> Exception:
        """Return the error of request `rid`: `RefusedError` for code 400. Else mark the server as lost."""
        if code in (400, "400"):
            return RefusedError(f"rid={rid}: the server refuses it: {message}")
        return self.lose(f"answered {code} to {rid}: {message}")


def _words(error: BaseException) -> str:
    """Type and message of an error, or only its type if the message is empty."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _excerpt(data: bytes) -> str:
    return " ".join(data[:200].decode(errors="replace").split())
