"""A real scoring process for the tests: length-prefixed MessagePack on stdin and stdout.

Its reward does what the response says: `7` is worth 7.0, `spin` never ends, `hang` never ends and cannot be
interrupted, `die` takes the process down.
"""

import asyncio
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence

from laminar_py.records import codec
from laminar_py.records.scoring import Score, ScoringRequest
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
    if request.response == "die":
        os._exit(1)
    return float(request.response)


class ScoringProcess:
    """A `Scorer` behind a pipe."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls) -> "ScoringProcess":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, __file__, stdin=pipe, stdout=pipe)
        scorer = cls(process)
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

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await asyncio.wait_for(self.process.wait(), 10)


def serve() -> None:
    worker = ScoringWorker(reward, timeout_s=TIMEOUT_S)
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
