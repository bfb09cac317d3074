"""The benchmark over hosts with links of their own, in its smallest form: all sides run, nothing is compared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_py.bench import relay_network
from laminar_py.bench.relay_hosts import rows
from laminar_py.config.section import ConfigError

MIB = 2**20
PATIENCE_S = 20.0
KILLED = """
import os, signal
from laminar_py.bench.relay_host import HostWorker, receive_bare
from laminar_py.bench.relay_network import Network, shared_folder

with Network(1, mbit_per_s=1) as network, shared_folder():
    HostWorker(network.hosts[0], receive_bare, network.address(0)).hear(tuple)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _hosts() -> None:
    try:
        relay_network.require(64 * MIB)
    except ConfigError as error:
        pytest.skip(str(error))


def traces(pid: int) -> list[Path]:
    """What a benchmark of this process id has left."""
    folders = (relay_network.NAMESPACES, relay_network.SHARED_MEMORY)
    return [path for folder in folders for path in folder.glob(f"{relay_network.PREFIX}{pid}*")]


def test_every_row_is_there_and_nothing_is_left():
    heard = []
    found = rows(repeats=1, tell=heard.append, num_hosts=3, num_bytes=4 * MIB, mbit_per_s=2000)
    bounds = [f"{shape}_over_bound" for shape in ("star", "chain", "kary2", "auto")]
    others = ["recovery_over_undisturbed", "gloo_3hosts_over_ours", "http_3hosts_over_ours"]
    assert [row.name for row in found] == ["W", *bounds, *others]
    assert all(row.value > 0 for row in found)
    assert heard
    assert not traces(os.getpid())


def test_a_killed_benchmark_leaves_no_process_and_its_network_goes_when_the_next_starts():
    killed = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE)
    killed.communicate(timeout=PATIENCE_S)  # its worker has that pipe, too
    assert traces(killed.pid)
    relay_network.remove_leftovers()
    assert not traces(killed.pid)
