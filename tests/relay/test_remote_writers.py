"""Ranks on other hosts than the root's: the version is as of one process, and the end of any rank leaves none."""

import errno
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import laminar_py.relay.publisher
from laminar_py.learner.distributed import group_of, join_group, leave_group
from laminar_py.records.weights import TensorSource
from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.remote_writers import RankLink, RemotePublisher, receive_rows
from laminar_py.relay.stored_version import NoRoomError
from laminar_py.relay.version_layout import HEADER_BYTES
from laminar_py.relay.version_store import SPARE
from tests.learner.ranks import FORKSERVER, prepared, run_ranks
from tests.relay.test_writers import loaded, ranks_of, shares, weights
from tests.relay.tree import CHUNK, PATIENCE_S

VERSIONS = 4  # the last are written over the mapped pages of the first
SHARD_BYTES = 2 * HEADER_BYTES


def publisher_of(store: Path, rank: int, writers: int) -> Publisher | RemotePublisher:
    """The publisher of a rank, as its process makes it; only the first `writers` ranks see the store."""
    group = group_of(dist.get_world_size())
    assert group is not None
    made: Publisher | RemotePublisher | None = None
    settings = {"chunk_bytes": CHUNK, "shard_bytes": SHARD_BYTES, "ranks": writers, "group": group}
    if rank == 0:
        made = Publisher(store, **settings)
    dist.barrier()
    if rank >= writers:
        made = RemotePublisher(group, rank=rank, writers=writers, shard_bytes=SHARD_BYTES)
    elif rank:
        made = Publisher(store, rank=rank, **settings)
    assert made is not None
    return made


def publish_main(rank: int, ranks: int, writers: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join_group(str(folder / "rendezvous"), rank=rank, world_size=ranks)
    store, copied = folder / "store", threading.Event()
    publisher = publisher_of(store, rank, writers)

    def receive_later(*arguments: Any) -> None:
        in_time = copied.wait(PATIENCE_S)
        copied.clear()
        receive_rows(*arguments)
        assert in_time, "a rank waits for more than its copy"

    laminar_py.relay.publisher.receive_rows = receive_later
    for version in range(VERSIONS):
        publisher.publish_sources(version, shares(weights(version), rank, ranks))
        dist.barrier()  # law 8: all ranks go on before any row travels
        copied.set()
        if isinstance(publisher, Publisher) and rank == 0:
            (folder / f"digest-{version}").write_text(publisher.completed(version).digest)
            if version and not (store / SPARE).exists():
                (store / f"v{version - 1}").rename(store / SPARE)  # as the root does
    publisher.close()
    leave_group()


@pytest.mark.parametrize(("ranks", "writers"), [(2, 1), (5, 2)])
def test_ranks_on_several_hosts_publish_the_digest_of_one_process(
    tmp_path: Path, ranks: int, writers: int
) -> None:
    run_ranks(publish_main, ranks, writers, tmp_path, world_size=ranks)
    with ranks_of(tmp_path / "alone", ranks=1) as alone:
        digests = [alone.publish(version, weights(version)) for version in range(VERSIONS)]
    assert [(tmp_path / f"digest-{version}").read_text() for version in range(VERSIONS)] == digests
    found = loaded(tmp_path / "store" / f"v{VERSIONS - 1}")
    assert all(found[name].equal(one.bfloat16()) for name, one in weights(VERSIONS - 1).items())


# ---- ranks that end, and a disk that is full

ROWS_BYTES = 500  # messages are shorter, the rows of a rank longer


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_version_main(rank: int, version: int, victim: int, fault: str, folder: Path) -> None:
    """Publish one version with two writers and two ranks on another host; `victim` has a fault on its way.

    Where all ranks survive the fault, they publish the next version with the same publishers.
    """
    torch.set_num_threads(1)
    join_group(str(folder / f"rendezvous-{version}-{fault}"), rank=rank, world_size=4)
    publisher = publisher_of(folder / "store", rank, 2)
    sources = shares(weights(version), rank, 4)
    if rank == victim and fault == "copy":
        sources[2] = TensorSource(sources[2].stored, die)  # type: ignore[arg-type]
    if rank == victim and fault == "raise":
        sources[2] = TensorSource(sources[2].stored, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    if rank == victim and fault == "rows":
        for name in ("send_bytes", "receive_bytes"):
            setattr(RankLink, name, dying_amid_rows(getattr(RankLink, name)))
    write = MappedFile.write
    if rank == victim and fault == "write":

        def full(pages: MappedFile, position: int, data: np.ndarray) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(pages, position, data)

        MappedFile.write = full  # type: ignore[method-assign]
    error = ""
    try:
        publisher.publish_sources(version, sources)
        if isinstance(publisher, Publisher) and rank == 0:
            publisher.completed(version)
    except (RuntimeError, ZeroDivisionError, OSError, NoRoomError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    (folder / f"error-{rank}").write_text(error)
    if fault in ("raise", "write"):
        dist.barrier()
        MappedFile.write = write  # type: ignore[method-assign]
        publisher.publish_sources(version + 1, shares(weights(version + 1), rank, 4))
    publisher.close()


def dying_amid_rows(transfer: Callable[[RankLink, memoryview], None]) -> Callable[[RankLink, memoryview], None]:
    """The transfer of a process that is killed when it transfers the second block of rows."""
    seen: list[int] = []

    def dying(link: RankLink, data: memoryview) -> None:
        if len(data) > ROWS_BYTES:
            seen.append(len(data))
        if len(seen) == 2:
            die()
        transfer(link, data)

    return dying


def run(folder: Path, version: int, *, victim: int = -1, fault: str = "none") -> list[str | None]:
    """Publish a version; returns each rank's error, None for a rank that was killed."""
    prepared()
    context = multiprocessing.get_context(FORKSERVER)
    processes = [
        context.Process(target=one_version_main, args=(rank, version, victim, fault, folder)) for rank in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * PATIENCE_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert None not in codes, f"a rank hangs: {codes}"
    texts = [(folder / f"error-{rank}").read_text() if code == 0 else None for rank, code in enumerate(codes)]
    assert all(code in (0, -signal.SIGKILL) for code in codes), codes
    return texts


@pytest.mark.parametrize(
    ("victim", "fault"),
    [
        (2, "rows"),
        (0, "rows"),
        pytest.param(1, "rows", marks=pytest.mark.slow),
        pytest.param(3, "copy", marks=pytest.mark.slow),
    ],
)
def test_the_end_of_any_rank_leaves_no_version_and_the_next_ranks_publish(
    tmp_path: Path, victim: int, fault: str
) -> None:
    assert run(tmp_path, 1) == [""] * 4
    errors = run(tmp_path, 2, victim=victim, fault=fault)
    assert errors[victim] is None
    store = tmp_path / "store"
    if victim == 0:
        assert {path.name for path in store.iterdir()} == {"v1", "v2.new"}
    else:
        assert errors[0], "rank 0 raises the end of the rank"
        assert [path.name for path in store.iterdir()] == ["v1"]
    assert run(tmp_path, 2, fault="next") == [""] * 4
    assert {path.name for path in store.iterdir()} == {"v1", "v2"}
    assert all(loaded(store / "v2")[name].equal(one.bfloat16()) for name, one in weights(2).items())
    shutil.rmtree(store)


@pytest.mark.parametrize(
    ("victim", "fault", "expected"),
    [
        (3, "raise", "rank 3 of the learner: ZeroDivisionError"),
        (1, "write", "NoRoomError: relay.shm=.*: version 1 needs at least"),
    ],
)
def test_an_error_of_a_rank_is_named_and_leaves_no_version_and_the_next_is_complete(
    tmp_path: Path, victim: int, fault: str, expected: str
) -> None:
    errors = run(tmp_path, 1, victim=victim, fault=fault)
    assert re.search(expected, errors[0] or "")
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["v2"]
    found = loaded(tmp_path / "store" / "v2")
    assert all(found[name].equal(one.bfloat16()) for name, one in weights(2).items())
