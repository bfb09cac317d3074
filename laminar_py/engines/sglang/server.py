"""Launches and owns an SGLang server. Called by the process of a replica or a pool, and by tests.

The server lives no longer than its owner: a guard (`guard.py`) between the two ends all processes of the server,
also when the owner is killed (`tests/engines/sglang/test_guard.py`). To restart, call `stop` and make a new
`SGLangServer`.
"""

import asyncio
import json
import os
import re
import secrets
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Self

import aiohttp
import psutil

from laminar_py.children.hosted import trim_log
from laminar_py.engines.sglang.guard import GuardRequest
from laminar_py.engines.sglang.http import headers
from laminar_py.engines.sglang.launch import LOOPBACK, ServerSpec
from laminar_py.records.engine import EngineLostError

GUARD_SCRIPT = str(Path(__file__).with_name("guard.py"))
LOOK_S = 0.2
ANSWER_S = 10.0
TRIM_EVERY_S = 60.0
TAIL_BYTES = 65536
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
NUM_PORTS = 8192  # number of ports to choose from
_ERROR = re.compile(r"^([\w.]+(Error|Exception|Interrupt)|.*: error)\b")
_STAMP = re.compile(r"^\[[^\]]*\]\s*")


class SGLangServer:
    """A launched server. Its key goes through a private file, so that no other user of the machine sees it."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.api_key = secrets.token_hex(32)  # hex has no leading dash, which would make it a flag
        self._port = 0
        self._log_start = 0
        self._guard: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """URL of the started server."""
        assert self._port, "not started"
        return f"http://{self.spec.host}:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the guard's parent, which ends last."""
        assert self._guard is not None, "not started"
        return self._guard.pid

    async def start(self) -> None:
        """Launch the server and wait until it answers. `EngineLostError` names the reason if it does not."""
        assert self._guard is None, "started before"
        setting, limit_s = self.spec.start_limit
        try:
            await self._launch()
            async with asyncio.timeout(limit_s):
                await self._wait_until_up()
            self._log_start = self.spec.log.stat().st_size  # lines of the start explain no later failure
        except TimeoutError:
            await self.stop()
            raise EngineLostError(self._explain(f"no answer within {setting}={limit_s:g}")) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server and all processes that it started."""
        guard = self._guard
        if guard is None:
            return
        assert guard.stdin is not None, "the guard has an input"
        guard.stdin.close()
        await guard.wait()

    async def watch(self) -> None:
        """Keep the server's log bounded until the server ends, then raise `EngineLostError`."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(TRIM_EVERY_S):
                    raise EngineLostError(self._explain(await self._ended()))
            trim_log(self.spec.log)

    async def _ended(self) -> str:
        """Wait for the end of the server, and describe it by its exit code."""
        assert self._guard is not None, "not started"
        return f"the process ended with code {await self._guard.wait()}"

    async def _launch(self) -> None:
        """Start the server below a guard process, which ends the server when this process ends.

        The key goes through the guard's input, so that no other user sees it on a command line.
        """
        self._port = _free_port(self.spec.host)
        environment = await asyncio.to_thread(self.spec.environment)  # it may ask an interpreter
        with _open_private(self.spec.log) as log:  # SGLang writes its key into it
            self._log_start = log.tell()
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                GUARD_SCRIPT,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        request = GuardRequest(self.spec.command(self._port), {"api-key": self.api_key})
        assert self._guard.stdin is not None, "the guard has an input"
        self._guard.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        with suppress(ConnectionError):  # it has ended already; `_wait_until_up` finds it
            await self._guard.stdin.drain()

    async def _wait_until_up(self) -> None:
        """Return when the server answers. Raises `EngineLostError` with the end of its log if it exits first."""
        ended = asyncio.create_task(self._ended())
        up = asyncio.create_task(self._answers())
        try:
            await asyncio.wait((ended, up), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise EngineLostError(self._explain(ended.result()))
            up.result()
        finally:
            ended.cancel()
            up.cancel()

    async def _answers(self) -> None:
        """Ask the server for its model every `LOOK_S` seconds, and return when it answers with status 200."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(headers=headers(self.api_key), timeout=timeout) as session:
            while True:
                if self._listens():
                    with suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(f"{self.url}/model_info") as response:
                            if response.status == 200:
                                return
                await asyncio.sleep(LOOK_S)

    def _listens(self) -> bool:
        """True if a process of this server listens on the port. The key must not go to another process."""
        with suppress(psutil.Error):  # it has ended
            for process in psutil.Process(self.pid).children(recursive=True):
                for end in process.net_connections("tcp"):
                    if end.status == psutil.CONN_LISTEN and end.laddr.port == self._port:
                        return True
        return False

    def _explain(self, what: str) -> str:
        """Build the message of the failure `what`, with the line of the log that best explains it."""
        log = self.spec.log
        with log.open("rb") as file:
            size = log.stat().st_size
            file.seek(max(self._log_start if self._log_start < size else 0, size - TAIL_BYTES))  # a log is trimmed
            tail = file.read().decode(errors="replace")
        return f"SGLang server on port {self._port}: {what}; it last said: {last_words(tail)} (log: {log})"


def last_words(output: str) -> str:
    """Find the line of a server's output that best explains its end: the last error, or else the last line."""
    lines = [_STAMP.sub("", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if _ERROR.match(line)]
    return ([*lines, *errors] or ["nothing"])[-1][:300]


def _open_private(path: Path) -> BinaryIO:
    """Open a file to append, readable by this user only, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def _free_port(host: str = LOOPBACK) -> int:
    """Find a free port below the ephemeral range, so that no connection takes it before the server listens."""
    above = int(EPHEMERAL_PORTS.read_text().split()[0])
    ports = range(max(1024, above - NUM_PORTS), above) or range(1024, 1024 + NUM_PORTS)
    for port in secrets.SystemRandom().sample(ports, len(ports)):
        with socket.socket() as trial, suppress(OSError):
            trial.bind((host, port))
            return port
    raise EngineLostError(
        f"no port from {ports.start} to {ports.stop} is free for an SGLang server; stop a process that has one"
    )
