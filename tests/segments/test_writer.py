"""Writers: each reference can be read, files end at their size, and a full disk costs no frame that was whole."""

import asyncio
import errno
import os
import resource
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.ledger.segments.frames import make_frame, whole_frames
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import Journal, SegmentWriter, write_whole
from tests.segments.pieces import make_piece, random_piece

DISK_BYTES = 256 * 2**10


def read(folder, refs):
    """The pieces of these, by a reader of its own."""
    reader = PayloadReader(folder)
    loaded = reader.load(refs)
    found = [loaded.piece(ref) for ref in refs]
    reader.close()
    return found


def frames_in(folder, pattern="*"):
    """Pieces of all files, from their beginnings on; the files must end with a whole frame."""
    found = []
    for path in sorted(folder.glob(pattern)):
        data = path.read_bytes()
        there = list(whole_frames(memoryview(data)))
        assert sum(make_frame(piece).num_bytes for piece in there) == len(data), f"{path} has a torn end"
        found += there
    return found


def test_each_reference_can_be_read_as_soon_as_there_is_one(tmp_path):
    writer = SegmentWriter(tmp_path / "new", "replica-3")
    written, refs = [], []
    for count in (1, 2, 0, 5):
        pieces = [make_piece(f"g{len(written)}.{place}", tokens=3 * place) for place in range(count)]
        refs += writer.write_all(pieces)
        written += pieces
        assert read(tmp_path / "new", refs) == written
    assert frames_in(tmp_path / "new") == written
    assert {ref.segment.split(".")[0] for ref in refs} == {"replica-3"}


async def test_one_sync_serves_all_callers_that_wait_and_no_later_piece(tmp_path, monkeypatch):
    syncs, go_on = [], threading.Semaphore(0)

    def fdatasync(file):
        syncs.append(os.fstat(file).st_size)
        assert go_on.acquire(timeout=30)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    alone, shared = SegmentWriter(tmp_path, "replica-3"), SegmentWriter(tmp_path, "replica-4", shared=True)
    alone.write(make_piece())
    await alone.synced()
    await shared.synced()
    assert syncs == [], "no other host reads it, or nothing is written"
    shared.write(make_piece("a"))
    first = asyncio.create_task(shared.synced())
    while not syncs:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    shared.write_all([make_piece("b"), make_piece("c")])
    later = [asyncio.create_task(shared.synced()) for _ in range(5)]
    go_on.release()
    await first
    assert not any(task.done() for task in later)
    go_on.release()
    await asyncio.gather(*later)
    await shared.synced()
    assert syncs[0] < syncs[1] == shared.size
    assert len(syncs) == 2


async def test_after_a_failed_sync_no_later_one_succeeds(tmp_path, monkeypatch):
    faults = [OSError(errno.EIO, "Input/output error")]  # the kernel tells of lost bytes once
    monkeypatch.setattr(os, "fdatasync", lambda file: faults and raise_(faults.pop()))
    writer = SegmentWriter(tmp_path, "replica-3", shared=True)
    writer.write(make_piece("a"))
    for sync in (writer.on_disk, writer.synced):
        with pytest.raises(OSError, match="Input/output error"):
            await sync()


def raise_(error):
    raise error


def test_a_segment_is_its_owners_alone(tmp_path):
    SegmentWriter(tmp_path / "segments", "replica-3").write(make_piece())
    (segment,) = (tmp_path / "segments").iterdir()
    assert (segment.stat().st_mode & 0o777, segment.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@given(sizes=st.lists(st.integers(0, 30), max_size=1500), most=st.integers(1, 40))
def test_buffers_are_written_whole_however_little_the_kernel_takes_at_once(sizes, most):
    buffers = [os.urandom(size) for size in sizes]
    taken = bytearray()

    def writev(file, rest):
        assert len(rest) <= 1024, "the kernel takes no more"
        data = b"".join(rest)[:most]
        taken.extend(data)
        return len(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", writev)
        write_whole(7, buffers)
    assert taken == b"".join(buffers)


def test_a_thread_may_bring_to_disk_what_another_writes(tmp_path):
    writer = SegmentWriter(tmp_path, "replica-3")
    with ThreadPoolExecutor(1) as pool:
        refs = []
        for _ in range(300):
            syncing = pool.submit(writer.sync)
            refs += [writer.write(make_piece(tokens=20)) for _ in range(3)]
            syncing.result()
    writer.close()
    assert len(read(tmp_path, refs)) == 900
    assert not [link for link in os.listdir("/proc/self/fd") if _leads_into(link, tmp_path)], "all are closed"


def _leads_into(link, folder):
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{link}").startswith(str(folder))
    return False


@contextmanager
def small_disk(folder):
    """A file system of `DISK_BYTES`, for root."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(options, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_on_a_full_disk_a_batch_is_taken_back_and_frames_lie_end_to_end(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        writer = SegmentWriter(disk, "replica-3")
        written = [random_piece(f"g0.{place}", tokens=5000) for place in range(4)]
        refs = writer.write_all(written)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left on device"):
                writer.write_all([random_piece(tokens=5000) for _ in range(4)])
            assert frames_in(disk) == read(disk, refs) == written
        written.append(make_piece())
        refs.append(writer.write(written[-1]))
        assert frames_in(disk) == read(disk, refs) == written
        writer.close()


def test_on_a_full_disk_a_journal_keeps_whole_entries_and_goes_on_when_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        (disk / "other").write_bytes(bytes(DISK_BYTES // 2))
        journal = Journal(disk, "replica-3")
        first, large, last = make_piece("a"), random_piece("b", tokens=25_000), make_piece("c")
        journal.write([first])
        with pytest.raises(OSError, match="No space left on device"):
            journal.write([large])
        (disk / "other").unlink()
        journal.write([large, last])
        assert frames_in(disk, "*.journal") == [first, large, last]
        journal._files[0][0].close()  # before the disk goes


def test_a_write_that_a_limit_cuts_short_is_taken_back(tmp_path):
    code = f"""
        import resource, signal
        from pathlib import Path
        from laminar_py.ledger.segments.writer import SegmentWriter
        from tests.segments.pieces import make_piece, random_piece
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = SegmentWriter(Path({str(tmp_path)!r}), "replica-3")
        writer.write(make_piece("a"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, {resource.RLIM_INFINITY}))
        try:
            writer.write_all([make_piece("b"), random_piece("c", tokens=5000)])
        except OSError as error:
            print(error.strerror)
        writer.write(make_piece("d"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "File too large\n"
    assert frames_in(tmp_path) == [make_piece("a"), make_piece("d")]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_entries_are_there_as_soon_as_they_are_written(tmp_path):
    journal = Journal(tmp_path / "new", "replica-3")
    journal.write([])
    assert not (tmp_path / "new").exists(), "the first file is made with the first entry"
    entries = [make_piece("a"), make_piece("b"), make_piece("a", start=5)]
    journal.write(entries[:2])
    journal.write(entries[2:])
    assert frames_in(tmp_path / "new") == entries
    assert len(files(tmp_path / "new")) == 1


def test_a_file_goes_when_all_trajectories_in_it_have_left(tmp_path):
    journal = Journal(tmp_path, "replica-3", roll_bytes=1)
    journal.write([make_piece("a"), make_piece("b")])
    journal.write([make_piece("b", start=5)])
    journal.write([make_piece("c")])
    first, second, third = files(tmp_path)
    journal.forget("a")
    assert files(tmp_path) == [first, second, third]
    journal.forget("unknown")
    journal.forget("b")
    assert files(tmp_path) == [third]
    journal.forget("c")
    assert files(tmp_path) == [third], "the present one stays"
    journal.write([make_piece("d")])
    journal.forget("none")
    assert len(files(tmp_path)) == 1, "and goes when there is another"
    assert frames_in(tmp_path) == [make_piece("d")]
