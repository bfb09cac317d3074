"""A process that owns a server, to be killed: `python -m tests.engines.sglang.owner PYTHON MODEL`.

Prints the ids of the server's processes in one line, parents first, and waits.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from laminar_py.config.cluster import Device
from laminar_py.engines.sglang.launch import replica_server
from laminar_py.engines.sglang.server import SGLangServer

PATIENCE_S = 20


async def own(python: Path, model: Path, log: Path) -> None:
    spec = replica_server(
        python=python,
        model_dir=model,
        log=log,
        max_batch=4,
        max_len=64,
        kv_capacity=256,
        device=Device.CPU,
        dtype="float32",
    )
    async with SGLangServer(spec) as server:
        below = psutil.Process(server.pid).children(recursive=True)
        sys.stdout.write(" ".join(str(process.pid) for process in [psutil.Process(server.pid), *below]) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


@asynccontextmanager
async def owned_server(python: Path, model: Path) -> AsyncIterator[tuple[int, list[psutil.Process]]]:
    """The owner's process id, and the server's processes: stand-in, guard, launcher and what that started."""
    with TemporaryDirectory() as folder:
        owner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.engines.sglang.owner", str(python), str(model), f"{folder}/log"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert owner.stdout is not None
        try:
            pids = (await owner.stdout.readline()).split()
            yield owner.pid, [psutil.Process(int(pid)) for pid in pids]
        finally:
            with suppress(ProcessLookupError):
                owner.kill()
            await owner.wait()


def wait_until_gone(processes: list[psutil.Process]) -> None:
    """Returns when all have ended, whether or not anyone has collected them."""
    deadline = time.monotonic() + PATIENCE_S
    while any(_lives(process) for process in processes):
        assert time.monotonic() < deadline, f"still there: {processes}"
        time.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(own(*map(Path, sys.argv[1:])))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False
