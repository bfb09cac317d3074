"""`laminar dashboard`: the report's page over HTTP on loopback, refreshed while the run runs, and `/metrics`.

The server only reads. A request reads the ledger again if it has grown, for at most a tenth of the time. The
server answers only to the names of this machine, so that no foreign page reads texts of the run. It has no TLS and
no accounts; `ssh -L` or a proxy carries it to another machine.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from laminar_lab.report.metrics import CONTENT_TYPE, metrics_text
from laminar_lab.report.page import encode_page, make_page, render_page
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_py.config.section import ConfigError
from laminar_py.ledger import ledger_path, reading

LOOPBACK = "127.0.0.1"
NAMES = frozenset({"localhost", LOOPBACK})  # host names that a request may have
LEAST_S = 2.0  # between two readings
SHARE = 0.1  # of the time: most that readings take
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class DrawnPage:
    """Responses from one reading of the ledger."""

    seq: int  # of the last event
    body: bytes  # data of the page
    metrics: bytes  # the text of `/metrics`


class Reader:
    """Reads the ledger of a run for requests; threads may share it."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._drawn: DrawnPage | None = None
        self._next_s = 0.0  # monotonic time of the next reading
        self._lock = threading.Lock()

    def newest(self) -> DrawnPage:
        """Return the responses of the newest reading; read again if the ledger has grown and a reading is due.

        While another thread reads, return the earlier responses, if there are any. Raises `ConfigError` or
        `OSError` if the record cannot be read.
        """
        drawn = self._drawn
        if not self._lock.acquire(blocking=drawn is None) and drawn is not None:
            return drawn
        try:
            drawn = self._drawn
            if drawn is not None and (time.monotonic() < self._next_s or self._last_seq() == drawn.seq):
                return drawn
            began_s = time.monotonic()
            try:
                report = RunReport(read_snapshot(self._run))
                drawn = DrawnPage(report.snapshot.seq, encode_page(make_page(report)), metrics_text(report))
            finally:
                now_s = time.monotonic()
                self._next_s = now_s + max(LEAST_S, (now_s - began_s) * (1 / SHARE - 1))
            self._drawn = drawn
            return drawn
        finally:
            self._lock.release()

    def _last_seq(self) -> int:
        with reading(self._run) as connection:
            seq: int = connection.execute("SELECT seq FROM head").fetchone()[0]
        return seq


class _Handler(BaseHTTPRequestHandler):
    """Answers one request; a subclass of `make_server` has the run's reader and its empty page."""

    reader: Reader
    page: bytes

    def do_GET(self) -> None:
        """Answer with the page, its data (304 if the browser has the newest), or the metrics.

        Status 421 refuses a foreign host name, and 503 has the reason why the record cannot be read.
        """
        if self.headers.get("Host", "").partition(":")[0].lower() not in NAMES:
            return self._send(421, b"this host name is not served here")
        if self.path == "/":
            return self._send(200, self.page, "text/html; charset=utf-8")
        if self.path not in ("/data.json", "/metrics"):
            return self._send(404, b"there are /, /data.json and /metrics")
        try:
            drawn = self.reader.newest()
        except (ConfigError, OSError) as error:
            return self._send(503, str(error).encode())
        if self.path == "/metrics":
            return self._send(200, drawn.metrics, CONTENT_TYPE)
        tag = f'"{drawn.seq}"'
        if self.headers.get("If-None-Match") == tag:
            return self._send(304, b"")
        return self._send(200, drawn.body, "application/json", tag=tag)

    def log_message(self, format: str, *args: object) -> None:
        """Print no line for a request."""

    def _send(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8", *, tag: str = "") -> None:
        self.send_response(status)
        headers = {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in (headers | ({"ETag": tag} if tag else {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def make_server(run: Path, *, port: int) -> ThreadingHTTPServer:
    """Return a server of a run that listens on loopback. Raises `ConfigError` for a bad run or port."""
    with reading(run):  # so that a bad run fails now
        pass
    handler = type("Handler", (_Handler,), {"reader": Reader(run), "page": render_page(None).encode()})
    try:
        return ThreadingHTTPServer((LOOPBACK, port), handler)
    except OSError as error:
        raise ConfigError(f"--port={port}: cannot listen there ({error.strerror}); name a free one") from None


def serve(run: Path, *, port: int, announce: Callable[[str], None]) -> None:
    """Serve until Ctrl-C, which does not wait for a reading; `announce` gets the address."""
    with make_server(run, port=port) as server:
        address = f"http://{LOOPBACK}:{server.server_address[1]}"
        announce(f"{ledger_path(run).parent} at {address}/ and /metrics, until Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
