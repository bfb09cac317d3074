"""`laminar dashboard`: the report's page over HTTP, with fresh data while the run is running, and `/metrics`.

The server only reads. One thread reads the ledger at a time, for at most a tenth of the time; Ctrl-C does not wait
for it. Queries of texts are answered one at a time. Beyond loopback each request needs the token, and on loopback
the server answers only to the names of this machine (`tests/report/test_dashboard.py`).
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

from laminar_lab.report.figures import CONTENT_TYPE, metrics_text
from laminar_lab.report.page import encode_page, make_page, render_page
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.texts import answer_list, answer_sample
from laminar_py.config.section import ConfigError
from laminar_py.ledger import LedgerError, ledger_path, reading

log = logging.getLogger(__name__)

LEAST_S = 2.0  # between two readings
SHARE = 0.1  # of the time: most that readings take
MOST_QUERIES = 16  # of texts that wait; a browser sends two at a time
CLOSE_S = 2.0  # for open responses at the end
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
Query = Callable[[Path, Mapping[str, str]], bytes]


@dataclass(frozen=True, slots=True)
class DrawnPage:
    """Responses from one reading of the ledger."""

    seq: int  # of the last event
    body: bytes  # data of the page
    metrics: bytes  # the text of `/metrics`


class Reader:
    """Reads the ledger again and again, and keeps the responses in `drawn`."""

    def __init__(self, run: Path) -> None:
        self.drawn: DrawnPage | None = None
        self.wait_s = LEAST_S  # until the next reading
        self.trouble = "the ledger is being read for the first time"  # why `drawn` is not up to date, else ""
        self.run = run

    async def run_forever(self) -> None:
        """Read again and again, until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await _in_daemon_thread(self.refresh)
            except (ConfigError, OSError) as error:  # unreadable at this moment, or the folder is gone
                if str(error) != self.trouble:
                    log.warning("%s", error)
                self.trouble = str(error)
            self.wait_s = max(LEAST_S, (time.monotonic() - began) * (1 / SHARE - 1))
            await asyncio.sleep(self.wait_s)

    def refresh(self) -> None:
        """Read the ledger, if it has grown since the last reading. Raises a one-line `ConfigError`."""
        if self.drawn is not None and self._last_seq() == self.drawn.seq:
            self.trouble = ""
            return
        report = RunReport(read_snapshot(self.run))
        self.drawn = DrawnPage(report.snapshot.seq, encode_page(make_page(report)), metrics_text(report))
        self.trouble = ""

    def _last_seq(self) -> int:
        with reading(self.run) as connection:
            seq: int = connection.execute("SELECT seq FROM head").fetchone()[0]
        return seq


class TextQueries:
    """Answers queries of texts, one after the other."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def answer(self, answer: Query, values: Mapping[str, str]) -> web.Response:
        """Return JSON, or one line: 400 for a bad query, 503 for an unreadable ledger or too many queries."""
        if self._waiting >= MOST_QUERIES:
            return web.Response(status=503, text=f"{self._waiting} queries wait for an answer; send it again")
        self._waiting += 1
        try:
            async with self._lock:
                body = await _in_daemon_thread(lambda: answer(self._run, values))
        except (OSError, ValueError) as error:  # a `LedgerError` is a `ConfigError`, but no fault of the query
            is_bad = isinstance(error, ConfigError) and not isinstance(error, LedgerError)
            return web.Response(status=400 if is_bad else 503, text=str(error))
        finally:
            self._waiting -= 1
        response = web.Response(body=body, content_type="application/json")
        response.enable_compression()
        return response


def _in_daemon_thread(work: Callable[[], Found]) -> asyncio.Future[Found]:
    """Run `work` in a thread; the process may exit before it ends, since a reading can take a minute."""
    done = Future[Found]()
    done.set_running_or_notify_cancel()  # so that a cancelled caller leaves the thread alone

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - the caller raises it again
            done.set_exception(error)

    threading.Thread(target=run, name="reading", daemon=True).start()
    return asyncio.wrap_future(done)


def check_binding(host: str, token: str | None) -> None:
    """Raise `ConfigError` for a host beyond loopback without a token, or for a short token."""
    if not _is_loopback(host) and not token:
        raise ConfigError(
            f"--host={host}: reaches beyond this machine; set {TOKEN_VARIABLE} to a secret, or leave --host out"
        )
    if token is not None and len(token) < 16:
        raise ConfigError(f"{TOKEN_VARIABLE}: {len(token)} characters can be guessed; set at least 16")


def make_app(reader: Reader, *, host: str, token: str | None) -> web.Application:
    """Return the server of a reader; the caller runs `reader.run_forever`."""
    page = render_page(None).encode()
    texts = TextQueries(reader.run)

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=page, content_type="text/html", charset="utf-8")

    async def data(request: web.Request) -> web.Response:
        """Answer the page's data, 304 if the browser has the newest, or 503 while the run is unreadable."""
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
        if reader.drawn is None or reader.trouble:  # so that a scrape fails, instead of repeating old figures
            return web.Response(status=503, text=reader.trouble)
        return web.Response(body=reader.drawn.metrics, headers={"Content-Type": CONTENT_TYPE})

    async def samples(request: web.Request) -> web.Response:
        return await texts.answer(answer_list, _without_token(request))

    async def sample(request: web.Request) -> web.Response:
        return await texts.answer(answer_sample, _without_token(request))

    app = web.Application(middlewares=[_guard(_names(host), token)])
    app.add_routes([web.get("/", show), web.get("/data.json", data), web.get("/metrics", metrics)])
    app.add_routes([web.get("/samples.json", samples), web.get("/sample.json", sample)])
    return app


async def serve(run: Path, *, host: str, port: int, token: str | None, announce: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; `announce` gets the address. Raises `ConfigError` on a bad binding or run."""
    check_binding(host, token)
    with reading(run):  # so that a bad run fails now
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
        announce(f"{ledger_path(run).parent} at {_address(runner, host)}/ and /metrics, until Ctrl-C")
        async with asyncio.TaskGroup() as group:
            reading_task = group.create_task(reader.run_forever(), name="reader")
            await stop.wait()
            reading_task.cancel()
    finally:
        await runner.cleanup()


def _guard(names: frozenset[str] | None, token: str | None) -> Middleware:
    """Return middleware that refuses other host names (a foreign page bound to this address) and wrong tokens."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer 421 or 401 to a refused request; else call the handler and add the security headers."""
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
    """Return the host names that requests may have; None: any, since the token guards the server."""
    return frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if _is_loopback(host) else None


def _host_name(header: str) -> str:
    """Return the name in `Host` without its port: `[::1]:8000` gives `::1`."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, whose address is unknown


def _address(runner: web.AppRunner, host: str) -> str:
    port = runner.addresses[0][1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
