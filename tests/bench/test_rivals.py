"""The relay beside others in the smallest form: each side runs, nothing is compared."""

import os
import socket
import subprocess
import sys
import time
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import pytest

from laminar_lab.bench.registry import find
from laminar_lab.bench.relay import fanout, hop, hosts, namespaces
from laminar_lab.bench.relay.tree import CHUNK_BYTES
from laminar_lab.bench.workplace import SHARED_MEMORY
from laminar_py.config.section import ConfigError
from laminar_py.relay.digests import chunk_checksum
from laminar_py.relay.messages import CHECKSUM_BYTES

MIB = 2**20
PATIENCE_S = 60.0
KILLED = """
import os, signal
from functools import partial
from laminar_lab.bench.relay.namespaces import Network, shared_folder
from laminar_lab.bench.relay.hop import send

with Network(1, mbit_per_s=1) as network, shared_folder() as folder:
    source = folder / "source"
    source.write_bytes(b"1")
    network.start(0, partial(send, source=source, listen=(network.address(0), 0))).receive(tuple)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def _hosts() -> None:
    try:
        namespaces.require(64 * MIB)
    except ConfigError as error:
        pytest.skip(str(error))


def names(only: str) -> list[str]:
    return list(find("relay", only)[0].row_names)


def positive(rows) -> list[str]:
    """Names of rows, all of which have a figure."""
    assert all(row.value > 0 for row in rows)
    return [row.name for row in rows]


def traces(pid: int) -> list[Path]:
    """What a benchmark of this process id has left."""
    folders = (namespaces.NAMESPACES, SHARED_MEMORY)
    return [path for folder in folders for path in folder.glob(f"{namespaces.PREFIX}{pid}*")]


def test_a_bare_sender_makes_its_checksums_before_the_round_as_a_root_does(tmp_path, monkeypatch):
    made = []

    def checksum(chunk):
        made.append(time.monotonic())
        return chunk_checksum(chunk)

    monkeypatch.setattr(hop, "chunk_checksum", checksum)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * CHUNK_BYTES))
    ours, theirs = Pipe()
    send = partial(hop.send, theirs, source=source, listen=("127.0.0.1", 0))
    sender = Thread(target=send, daemon=True)
    sender.start()
    with (
        socket.create_connection(ours.recv(), timeout=PATIENCE_S) as connection,
        connection.makefile("rb") as stream,
    ):
        ours.send("send")
        sent = stream.read(2 * (CHECKSUM_BYTES + CHUNK_BYTES))
        assert ours.poll(PATIENCE_S)
        began = ours.recv()
    ours.send("")
    sender.join(PATIENCE_S)
    assert sent[:CHECKSUM_BYTES] == chunk_checksum(memoryview(source.read_bytes())[:CHUNK_BYTES])
    assert len(made) == 2
    assert max(made) <= began


@pytest.mark.slow
def test_each_peer_on_one_host_tells_its_own_conditions():
    found = fanout.rows(shm=SHARED_MEMORY, repeats=1, num_bytes=4 * MIB, num_replicas=2)
    assert positive(found) == names("fanout")
    ray, gloo = (row.conditions for row in found)
    assert "ray: ray.put" in ray
    assert "gloo: broadcast from and into memory that is not shared" in gloo


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts")
def test_every_figure_of_many_hosts_comes_once_and_nothing_is_left():
    found = hosts.rows(repeats=1, num_bytes=4 * MIB, num_hosts=3, mbit_per_s=2000)
    assert positive(found) == [name.replace("8hosts", "3hosts") for name in names("hosts")]
    gloo = found[-1].conditions
    assert "gloo: broadcast from and into memory that is not shared" in gloo
    assert not traces(os.getpid())


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts")
def test_a_killed_benchmark_leaves_no_process_and_its_network_goes_when_the_next_starts():
    killed = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE)
    killed.communicate(timeout=PATIENCE_S)  # its worker has that pipe, too
    assert traces(killed.pid)
    namespaces.remove_leftovers()
    assert not traces(killed.pid)
