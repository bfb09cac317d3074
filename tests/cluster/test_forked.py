"""Forked processes: GPUs by name, the last words of a process that dies, a server that dies or cannot start."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import psutil
import pytest

from laminar_py.children.hosted import LOG_BYTES
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster import forked
from laminar_py.runtime.cluster.backend import nodes, open_cluster
from laminar_py.runtime.cluster.errors import PartBugError, PartCrashedError
from laminar_py.runtime.cluster.forked import SHARED
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.placement import NodeSlot
from tests.cluster.test_part import Unmade

PATIENCE_S = 60.0
CLIENT = """
import asyncio
from laminar_py.runtime.cluster.backend import open_cluster
from laminar_py.runtime.cluster.part import Part
from tests.cluster.test_forked import Seeing

async def main():
    part = Part("part-0", Seeing, concurrency=1, timeout_s=60)
    print(await part.call("parent"), flush=True)
    await asyncio.Event().wait()

with open_cluster(None):
    asyncio.run(main())
"""


class Seeing:
    """Says what it sees."""

    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def parent(self):
        return os.getppid()

    def print_much(self):
        """Print more than a log keeps, wait until it was trimmed, print a word; return the size of the log."""
        for _ in range(LOG_BYTES // 60_000 + 1):
            os.write(1, b"noise\n" * 10_000)
        while not 0 < os.fstat(1).st_size < LOG_BYTES:
            time.sleep(0.01)
        os.write(1, b"word\n")
        return os.fstat(1).st_size

    def abort(self):
        os.write(2, b"a kernel failed\n")
        os.abort()


@contextmanager
def host(monkeypatch, gpus=""):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    with open_cluster(None):
        yield


def seeing(gpus=0):
    return Part("part-0", Seeing, concurrency=1, timeout_s=PATIENCE_S, place=NodeSlot(gpus=gpus))


async def test_a_part_waits_until_the_gpus_of_a_dead_one_are_free(monkeypatch):
    with host(monkeypatch, "4,5,7"):
        first, second = seeing(2), seeing(1)
        assert await first.call("gpus") == "4,5"
        assert await second.call("gpus") == "7"
        assert nodes()[0].gpus == 0
        third = seeing(2)
        asked = asyncio.create_task(third.call("gpus"))
        await asyncio.sleep(0.3)
        assert not asked.done()
        first.kill()
        assert await asked == "4,5"


async def test_a_part_that_waits_for_gpus_can_be_ended(monkeypatch):
    with host(monkeypatch, "0"):
        held, waiting = seeing(1), seeing(1)
        assert await held.call("gpus") == "0"
        asked = asyncio.create_task(waiting.call("gpus"))
        await asyncio.sleep(0.2)
        waiting.kill()
        with pytest.raises(PartCrashedError):
            await asked
        held.kill()


async def test_a_death_comes_with_the_last_words_of_the_process(monkeypatch):
    told = r"its process got SIGABRT; it last wrote: a kernel failed"
    with host(monkeypatch), pytest.raises(PartCrashedError, match=told):
        await seeing().call("abort")


async def test_the_output_of_a_process_that_prints_much_is_trimmed(monkeypatch):
    with host(monkeypatch):
        assert LOG_BYTES // 3 < await seeing().call("print_much") < LOG_BYTES


async def test_a_part_that_cannot_be_made_is_a_bug(monkeypatch):
    with host(monkeypatch), pytest.raises(PartBugError, match="TypeError: planted"):
        await Part("part-0", Unmade, concurrency=1, timeout_s=PATIENCE_S).call("anything")


async def test_a_call_that_is_cancelled_before_the_part_is_up_costs_no_other(monkeypatch):
    with host(monkeypatch):
        part = seeing()
        first = asyncio.create_task(part.call("gpus"))
        await asyncio.sleep(0)
        first.cancel()
        assert await part.call("gpus") == ""


async def test_a_server_that_is_not_there_is_the_death_of_a_part(monkeypatch, tmp_path):
    monkeypatch.setenv(SHARED, str(tmp_path / "nobody"))
    with host(monkeypatch), pytest.raises(PartCrashedError, match="its process did not start"):
        await seeing().call("gpus")


async def test_a_server_that_cannot_import_says_why(monkeypatch, tmp_path):
    monkeypatch.delenv(SHARED)
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    with (
        host(monkeypatch),
        pytest.raises(PartCrashedError, match="ImportError: this torch is broken"),
    ):
        await seeing().call("gpus")


def test_a_server_is_gone_with_the_controller_that_started_it(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != SHARED} | {"TMPDIR": str(tmp_path)}
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True, env=environment)
    server = psutil.Process(int(client.stdout.readline()))
    family = [server, *server.children()]
    assert len(family) == 2
    family[1].send_signal(signal.SIGSTOP)
    client.kill()
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
    client.communicate()
    assert not list(tmp_path.glob("laminar-*")), "no folder of sockets is left"


async def test_a_temporary_folder_with_a_long_name_is_no_obstacle(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with host(monkeypatch):
        assert await seeing().call("gpus") == ""


@pytest.mark.parametrize(("own", "used"), [({}, "/tmp"), ({"RAY_TMPDIR": "/var/tmp"}, "/var/tmp")])
def test_sockets_of_ray_are_in_a_folder_with_a_short_name(tmp_path, own, used):
    others = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}
    command = [sys.executable, "-c", "import os, laminar_py.runtime.cluster; print(os.environ.get('RAY_TMPDIR'))"]
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    told = subprocess.run(command, env={**others, "TMPDIR": str(folder), **own}, stdout=subprocess.PIPE, text=True)
    assert told.stdout.strip() == used


def test_a_temporary_folder_that_is_not_there_is_one_line_with_a_remedy(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with (
        pytest.raises(ConfigError, match=r"^TMPDIR=.*'/nowhere/.*; name a writable folder of at most"),
        open_cluster(None),
    ):
        pass


async def test_a_process_whose_answer_cannot_be_read_ends_and_gives_its_gpus_back(monkeypatch):
    with host(monkeypatch, "0"):
        part = seeing(1)
        await part.call("gpus")
        monkeypatch.setattr(forked, "read_answer", partial(decode, int))
        await part.call("gpus")  # its reader was chosen before
        with pytest.raises(PartCrashedError, match="sent an unreadable frame"):
            await part.call("gpus")
        monkeypatch.undo()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert await seeing(1).call("gpus") == "0"
