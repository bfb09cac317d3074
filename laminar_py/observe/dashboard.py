"""`laminar dashboard`: the report's page over HTTP, drawn again while the run goes on, and `/metrics`.

Owns the HTTP server and when the ledger is read again. Invariants: it only reads; one reading goes on at a time,
in a thread that Ctrl-C does not wait for, and takes at most a tenth of the time, however large the ledger; beside
it at most one question about texts is answered; nothing beyond loopback is answered without the token, and no host
name but those that it was started under.
"""

import asyncio
import hmac
import ipaddress
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import LedgerError, ledger_path, reading
from laminar_py.observe.figures import CONTENT_TYPE, expose
from laminar_py.observe.page import encode_page, make_page, render_page
from laminar_py.observe.record import read_snapshot
from laminar_py.observe.report import RunReport
from laminar_py.observe.texts import find_text, find_texts

log = logging.getLogger(__name__)

LEAST_S = 2.0  # between two readings
SHARE = 0.1  # of the time that readings may take
MOST_QUESTIONS = 16  # about texts that wait; a browser asks two at a time
CLOSE_S = 2.0  # for answers that are under way at the end
TOKEN_VARIABLE = "LAMINAR_DASHBOARD_TOKEN"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " img-src data: blob:; connect-src 'self'; font-src data:",
}

Found = TypeVar("Found")
Question = Callable[[Path, Mapping[str, str]], bytes]


@dataclass(frozen=True, slots=True)
class DrawnPage:
    """Answers, made of the last reading."""

    seq: int  # of the last event then
    body: bytes  # the page's data
    metrics: bytes  # the text of `/metrics`


class Reader:
    """Keeps `drawn` up to date."""

    def __init__(self, run: Path) -> None:
        self.drawn: DrawnPage | None = None
        self.wait_s = LEAST_S  # until the next look
        self.trouble = "the ledger is being read for the first time"  # why it is not up to date; else none
        self.run = run

    async def keep(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await _detached(self.look)
            except (ConfigError, OSError) as error:  # it cannot be read at this moment, or the folder is gone
                if str(error) != self.trouble:
                    log.warning("%s", error)
                self.trouble = str(error)
            self.wait_s = max(LEAST_S, (time.monotonic() - began) * (1 / SHARE - 1))
            await asyncio.sleep(self.wait_s)

    def look(self) -> None:
        """Read the ledger again, if anything has been added to it. Raises a one-line `ConfigError`."""
        if self.drawn is not None and self._newest() == self.drawn.seq:
            self.trouble = ""
            return
        report = RunReport(read_snapshot(self.run))
        self.drawn = DrawnPage(report.snapshot.seq, encode_page(make_page(report)), expose(report))
        self.trouble = ""

    def _newest(self) -> int:
        with reading(self.run) as connection:
            seq: int = connection.execute("SELECT seq FROM head").fetchone()[0]
        return seq


class TextAnswers:
    """Answers questions about texts, one after the other."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def answer(self, question: Question, query: Mapping[str, str]) -> web.Response:
        """JSON; or one line: 400 on a bad question, 503 where the ledger cannot be read now, or too many ask."""
        if self._waiting >= MOST_QUESTIONS:
            return web.Response(status=503, text=f"{self._waiting} questions wait for an answer; ask again")
        self._waiting += 1
        try:
            async with self._turn:
                body = await _detached(lambda: question(self._run, query))
        except (OSError, ValueError) as error:  # where no question is bad: the ledger cannot be read now
            is_bad = isinstance(error, ConfigError) and not isinstance(error, LedgerError)
            return web.Response(status=400 if is_bad else 503, text=str(error))
        finally:
            self._waiting -= 1
        answer = web.Response(body=body, content_type="application/json")
        answer.enable_compression()
        return answer


def _detached(work: Callable[[], Found]) -> asyncio.Future[Found]:
    """Done when `work` is, in a thread of its own; the process may end before: a reading can take a minute."""
    done = Future[Found]()
    done.set_running_or_notify_cancel()  # from now on nobody cancels it but in the event loop

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="reading", daemon=True).start()
    return asyncio.wrap_future(done)


def check_binding(host: str, token: str | None) -> None:
    """Raises `ConfigError` where others could reach it without a token, or the token is too short to be one."""
    if not _is_loopback(host) and not token:
        raise ConfigError(
            f"--host={host}: reaches beyond this machine; set {TOKEN_VARIABLE} to a secret, or leave --host out"
        )
    if token is not None and len(token) < 16:
        raise ConfigError(f"{TOKEN_VARIABLE}: {len(token)} characters can be guessed; set at least 16")


def make_app(reader: Reader, *, host: str, token: str | None) -> web.Application:
    """Answers of the server; `reader` is kept by whoever runs it."""
    page = render_page(None).encode()
    texts = TextAnswers(reader.run)

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=page, content_type="text/html", charset="utf-8")

    async def data(request: web.Request) -> web.Response:
        drawn, headers = reader.drawn, {"X-Refresh-Seconds": f"{reader.wait_s:.1f}"}
        if drawn is None or reader.trouble:
            return web.Response(status=503, text=reader.trouble, headers=headers)
        headers["ETag"] = f'"{drawn.seq}"'
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return web.Response(status=304, headers=headers)
        answer = web.Response(body=drawn.body, content_type="application/json", headers=headers)
        answer.enable_compression()
        return answer

    async def metrics(request: web.Request) -> web.Response:
        if reader.drawn is None or reader.trouble:  # a scrape that fails is told from figures that stand still
            return web.Response(status=503, text=reader.trouble)
        return web.Response(body=reader.drawn.metrics, headers={"Content-Type": CONTENT_TYPE})

    async def samples(request: web.Request) -> web.Response:
        return await texts.answer(find_texts, _without_token(request))

    async def sample(request: web.Request) -> web.Response:
        return await texts.answer(find_text, _without_token(request))

    app = web.Application(middlewares=[_guard(_names(host), token)])
    app.add_routes([web.get("/", show), web.get("/data.json", data), web.get("/metrics", metrics)])
    app.add_routes([web.get("/samples.json", samples), web.get("/sample.json", sample)])
    return app


async def serve(run: Path, *, host: str, port: int, token: str | None, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises `ConfigError` on a bad binding, or if there is no such run."""
    check_binding(host, token)
    with reading(run):  # now, not after the first browser has come
        pass
    reader = Reader(run)
    app = make_app(reader, host=host, token=token)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"--port={port}: cannot listen there ({error.strerror}); name a free one") from None
        tell(f"{ledger_path(run).parent} at {_address(runner, host)}/ and /metrics, until Ctrl-C")
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(reader.keep(), name="reader")
            await stop.wait()
            keeping.cancel()
    finally:
        await runner.cleanup()


def _guard(names: frozenset[str] | None, token: str | None) -> Middleware:
    """Middleware that refuses foreign names (a page elsewhere, bound to this address) and wrong tokens."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if names is not None and _host_name(request.host) not in names:
            return web.Response(status=421, text="this host name is not served here", headers=_HEADERS)
        if token is not None and not hmac.compare_digest(_bytes(_token_of(request)), _bytes(token)):
            headers = {**_HEADERS, "WWW-Authenticate": "Bearer"}
            return web.Response(status=401, text=f"the token of {TOKEN_VARIABLE} is needed", headers=headers)
        try:
            answer = await handler(request)
        except web.HTTPException as error:  # no such page, or another method
            return web.Response(status=error.status, text=error.reason, headers=_HEADERS)
        answer.headers.update(_HEADERS)
        return answer

    return guard


def _token_of(request: web.Request) -> str:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.query.get("token", "")


def _without_token(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.query.items() if name != "token"}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")  # a header may hold any bytes


def _names(host: str) -> frozenset[str] | None:
    """Host names that a browser may come under; any, where the token guards."""
    return frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if _is_loopback(host) else None


def _host_name(header: str) -> str:
    """Name in `Host`, without the port: `[::1]:8000` gives `::1`."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may mean anything


def _address(runner: web.AppRunner, host: str) -> str:
    port = runner.addresses[0][1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
