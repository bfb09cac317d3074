"""A process that calls a reward function: `python -m laminar_py.reward.calls.child`, started by `pool`.

Frames come on its first standard input and go to its first standard output; what the function prints goes to the
log, as its standard error does.
"""

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import BinaryIO

from laminar_py.config.reward import REWARDS, read_term
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.reward.calls.limited import LimitedFunction
from laminar_py.reward.calls.protocol import CallAnswer, CallRequest, CallStart, CallStarted, header
from laminar_py.sandbox.inside import kernel
from laminar_py.sandbox.protect import forbid_writes

log = logging.getLogger(__name__)
LATE_S = 1.0  # beyond its limit, after which a call hangs


def main() -> None:
    """Load the function that the first frame names, and answer requests until there are no more."""
    _die_with_parent()
    source, sink = _own_pipes()
    start = decode(CallStart, _read(source))
    with open(start.hang_log, "wb", buffering=0) as hangs:
        if start.record is not None and not forbid_writes(Path(start.record)):
            log.warning("no Landlock here: functions may write to %s and read our environment", start.record)
        try:
            function = _load(start)
        except ConfigError as error:
            _write(sink, CallStarted(fault=str(error)))
            return
        _write(sink, CallStarted(at_once=function.at_once))
        watch = Watch(hangs, start.timeout_s + LATE_S)
        if function.at_once > 1:
            asyncio.run(_serve_many(function, source, sink, watch))
        else:
            _serve_each(function, source, sink, watch)


def _load(start: CallStart) -> LimitedFunction:
    term = read_term(start.term)
    make = REWARDS.get(term.kind).make
    assert make is not None, f"{term.kind} is served by the scorer itself"
    with REWARDS.blaming(term.kind):
        function = make(term)
    if term.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (term.memory_bytes, term.memory_bytes))
    return LimitedFunction(function, timeout_s=start.timeout_s, columns=start.columns, threads=term.calls_at_once)


class Watch:
    """A thread of C that writes all stacks to a file after so long, also where a call holds the interpreter."""

    def __init__(self, file: BinaryIO, limit_s: float) -> None:
        self._file = file
        self.limit_s = limit_s

    def wind(self) -> None:
        """Start it, or have it start anew."""
        faulthandler.dump_traceback_later(self.limit_s, file=self._file)


def _serve_each(function: LimitedFunction, source: BinaryIO, sink: BinaryIO, watch: Watch) -> None:
    while frame := _read(source):
        asked = decode(CallRequest, frame)
        watch.wind()
        try:
            answer = CallAnswer(asked.number, function.call(asked.request))
        except Exception:  # noqa: BLE001 - a mistake of ours: what the user's code raises has an outcome
            answer = CallAnswer(asked.number, None, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        _write(sink, answer)


async def _serve_many(function: LimitedFunction, source: BinaryIO, sink: BinaryIO, watch: Watch) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)

    async def answer(asked: CallRequest) -> None:
        try:
            answer = CallAnswer(asked.number, await function.call_beside(asked.request))
        except Exception:  # noqa: BLE001 - a mistake of ours: what the user's code raises has an outcome
            answer = CallAnswer(asked.number, None, traceback.format_exc())
        _write(sink, answer)

    async def wind() -> None:
        while True:
            watch.wind()
            await asyncio.sleep(watch.limit_s / 2)

    running: set[asyncio.Task[None]] = {asyncio.create_task(wind(), name="watch")}
    while True:
        try:
            (size,) = header.unpack(await reader.readexactly(header.size))
            asked = decode(CallRequest, await reader.readexactly(size))
        except asyncio.IncompleteReadError:
            return
        task = asyncio.create_task(answer(asked), name=f"call-{asked.number}")
        running.add(task)
        task.add_done_callback(running.discard)


def _die_with_parent() -> None:
    """Have the kernel end this process with the scorer, also in the middle of a call; elsewhere its input ends."""
    if sys.platform == "linux":
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the scorer, moved away from where a function may read and print."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return source, sink


def _read(source: BinaryIO) -> bytes:
    """The next frame; b"" at the end."""
    head = source.read(header.size)
    return source.read(header.unpack(head)[0]) if len(head) == header.size else b""


def _write(sink: BinaryIO, record: object) -> None:
    body = encode(record)
    data = memoryview(struct.pack("<I", len(body)) + body)
    while data:
        data = data[sink.write(data) :]


if __name__ == "__main__":
    main()
