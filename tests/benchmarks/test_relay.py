"""The relay beside others in the smallest form: each side runs, nothing is compared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.catalog import ROWS
from benchmarks.relay import namespaces
from benchmarks.relay.measure import BroadcastSize, rows
from laminar_py.bench.catalog import row_names
from laminar_py.config.section import ConfigError

MIB = 2**20
PATIENCE_S = 60.0
SIZE = BroadcastSize(num_bytes=4 * MIB, num_replicas=2, num_hosts=3, mbit_per_s=2000)
KILLED = """
import os, signal
from functools import partial
from benchmarks.relay.namespaces import Network, shared_folder
from benchmarks.relay.sockets import send

with Network(1, mbit_per_s=1) as network, shared_folder() as folder:
    source = folder / "source"
    source.write_bytes(b"1")
    network.start(0, partial(send, source=source, listen=(network.address(0), 0))).hear(tuple)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def _hosts() -> None:
    try:
        namespaces.require(64 * MIB)
    except ConfigError as error:
        pytest.skip(str(error))


def measure(*parts):
    heard = []
    found = rows(parts, repeats=1, tell=heard.append, size=SIZE)
    assert all(row.value > 0 for row in found)
    assert heard
    return [row.name for row in found]


def traces(pid: int) -> list[Path]:
    """What a benchmark of this process id has left."""
    folders = (namespaces.NAMESPACES, namespaces.SHARED_MEMORY)
    return [path for folder in folders for path in folder.glob(f"{namespaces.PREFIX}{pid}*")]


def test_every_figure_of_one_host_comes_once_and_is_positive():
    assert sorted(measure("sockets", "fanout")) == sorted(row_names(ROWS, "relay", "sockets", "fanout"))


@pytest.mark.usefixtures("_hosts")
def test_every_figure_of_many_hosts_comes_once_and_nothing_is_left():
    assert measure("hosts") == [name.replace("8hosts", "3hosts") for name in row_names(ROWS, "relay", "hosts")]
    assert not traces(os.getpid())


@pytest.mark.usefixtures("_hosts")
def test_a_killed_benchmark_leaves_no_process_and_its_network_goes_when_the_next_starts():
    killed = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE)
    killed.communicate(timeout=PATIENCE_S)  # its worker has that pipe, too
    assert traces(killed.pid)
    namespaces.remove_leftovers()
    assert not traces(killed.pid)
