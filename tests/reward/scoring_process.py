"""A real scoring process for the tests: length-prefixed MessagePack on stdin and stdout.

Its reward does what the response says: `7` is worth 7.0, `spin` never ends, `hang` never ends and cannot be
interrupted, `hold` catches what interrupts it, `die` takes the process down.
"""

import asyncio
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from laminar_py.records import codec
from laminar_py.records.scoring import Begun, Score, ScoringRequest
from laminar_py.reward.begun import BegunFile, read_begun
from laminar_py.reward.stage import WorkerDiedError
from laminar_py.reward.worker import ScoringWorker

TIMEOUT_S = 0.2


def reward(request: ScoringRequest) -> float:
    if request.response == "spin":
        while True:
            pass
    if request.response == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(60)
    while request.response == "hold":
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001 - what a careless reward does
            continue
    if request.response == "die":
        os._exit(1)
    return float(request.response)


class ScoringProcess:
    """A `Scorer` behind a pipe."""

    def __init__(self, process: asyncio.subprocess.Process, folder: tempfile.TemporaryDirectory) -> None:
        self.process = process
        self.folder = folder  # deleted with this

    @classmethod
    async def start(cls) -> "ScoringProcess":
        pipe = asyncio.subprocess.PIPE
        folder = tempfile.TemporaryDirectory()
        path = Path(folder.name) / "begun"
        process = await asyncio.create_subprocess_exec(sys.executable, __file__, path, stdin=pipe, stdout=pipe)
        scorer = cls(process, folder)
        assert await asyncio.wait_for(process.stdout.readexactly(1), 20) == b"!"
        return scorer

    async def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        body = codec.encode(list(requests))
        try:
            self.process.stdin.write(struct.pack("<I", len(body)) + body)
            await self.process.stdin.drain()
            (size,) = struct.unpack("<I", await self.process.stdout.readexactly(4))
            return codec.decode(list[Score], await self.process.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerDiedError(f"pid {self.process.pid}") from error

    def begun(self) -> Begun | None:
        return read_begun(Path(self.folder.name) / "begun")

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await asyncio.wait_for(self.process.wait(), 10)


def serve() -> None:
    begin = BegunFile(Path(sys.argv[1]), timeout_s=TIMEOUT_S).begin
    worker = ScoringWorker(reward, timeout_s=TIMEOUT_S, begin=begin)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(b"!")
    sink.flush()
    while header := source.read(4):
        (size,) = struct.unpack("<I", header)
        body = codec.encode(worker.score(codec.decode(list[ScoringRequest], source.read(size))))
        sink.write(struct.pack("<I", len(body)) + body)
        sink.flush()


if __name__ == "__main__":
    serve()
