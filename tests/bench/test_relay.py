"""The relay's benchmark in its smallest form: every figure comes and is positive."""

import os
import socket
import time
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import pytest

from laminar_lab.bench.relay import hop
from laminar_lab.bench.relay.tree import CHUNK_BYTES
from laminar_lab.bench.workplace import SHARED_MEMORY
from laminar_py.relay.digests import chunk_checksum
from laminar_py.relay.messages import CHECKSUM_BYTES
from tests.bench.figures import figures

PATIENCE_S = 60.0


def left() -> set[Path]:
    return set(SHARED_MEMORY.glob("laminar-bench-*"))


@pytest.mark.slow
def test_every_figure_comes_once_and_is_positive_and_nothing_is_left():
    before = left()
    found = figures("relay", "hop", hop.rows(shm=SHARED_MEMORY, repeats=1, num_bytes=2**20))
    assert all(value > 0 for value in found.values())
    assert left() <= before


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
