"""The learner's end of the relay: writes a version into the root's store. Synchronous.

Each rank of the learner on the root's host owns a `Publisher`; it has no event loop. `publish` casts and copies
the rank's rows straight into pages that an older version no longer needs, and the learner waits for these copies
alone (law 8). A thread of each rank, the finisher, then receives rows of ranks on other hosts, if there are any,
and hashes a share of the chunks. Rank 0's finisher renames the folder, which the root notices. Each maps pages for
the next version. `publish` waits for the finisher first, so the two never touch pages, files and copier at once. A
version's folder appears by rename, complete and with its digests, or not at all
(`tests/relay/test_publisher.py::test_bad_tensors_are_refused_and_leave_nothing`). A crash of the root makes no
difference to the learner.
"""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save
from torch.distributed import ProcessGroup

from laminar_py.config.section import ConfigError
from laminar_py.records.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Published, TensorSource
from laminar_py.relay.device_copy import TensorCopier
from laminar_py.relay.digests import digest_of, hash_range, hashing_threads, version_digest
from laminar_py.relay.mapped_file import MappedFile, MappedFiles
from laminar_py.relay.messages import CHECKSUM_BYTES, MIN_CHUNK_BYTES, FileEntry, Manifest
from laminar_py.relay.remote_writers import RankLink, receive_rows, writer_of
from laminar_py.relay.stored_version import describe_version, no_room_errors
from laminar_py.relay.version_layout import SHARD_BYTES, VersionLayout, lay_out
from laminar_py.relay.version_store import complete_versions, folder_name, use_spare
from laminar_py.relay.writers import Follower, Leader

MAX_REMEMBERED = 8  # versions that `completed` knows


class Publisher:
    """Publishes versions into the root's store, e.g. `Publisher(store)`.

    The whole tree cuts files into chunks of `chunk_bytes`. With `adapter_config`, the text of
    `adapter_config.json`, each version is an adapter in the format of peft, with all tensors in one file. With
    several `ranks`, each has a publisher, rank 0's is made first, and all of them publish the same versions of the
    same tensors. `group` has these ranks, and behind them ranks on other hosts, each with a `RemotePublisher`.
    Raises `ConfigError` if `chunk_bytes` is too small.
    """

    def __init__(
        self,
        store: Path,
        *,
        chunk_bytes: int = 4 * 2**20,
        shard_bytes: int = SHARD_BYTES,
        adapter_config: bytes | None = None,
        rank: int = 0,
        ranks: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        if chunk_bytes < MIN_CHUNK_BYTES:
            raise ConfigError(f"chunk_bytes={chunk_bytes}: too small; set at least {MIN_CHUNK_BYTES}")
        assert adapter_config is None or ranks == 1, "one rank publishes adapters, which are small"
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._shard_bytes = shard_bytes
        self._adapter_config = adapter_config
        if rank == 0:
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in store.glob("v*.new"):
                shutil.rmtree(unfinished)
        remote = {one: RankLink(group, one) for one in range(ranks, group.size())} if group else {}
        self._has_remote = bool(remote)
        self._senders = [link for one, link in remote.items() if writer_of(one, ranks) == rank]
        if rank:
            self._writers: Follower | Leader = Follower(store, rank=rank, ranks=ranks)
        else:
            self._writers = Leader(store, followers=ranks - 1, remote=list(remote.values()))
        self._leads = rank == 0
        self._highest = max(complete_versions(store), default=-1)
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finish")
        self._hashers = hashing_threads(processes=ranks)
        self._copier = TensorCopier()
        self._pages = MappedFiles()
        self._finishing: dict[int, Future[Published | None]] = {}  # by version, the last few
        self._last_task: Future[None] | None = None  # of the finisher, which is idle after it

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Copy a version out of the learner's memory into the store; return the seconds that the learner waited.

        Afterwards the tensors may change. A thread then completes the version (`completed` waits for it). Raises
        `ValueError` unless `version` is above all earlier ones and tensors have distinct names, and `NoRoomError`
        on a full file system; an error leaves nothing of the version.
        """
        return self.publish_sources(version, (TensorSource.whole(name, tensor) for name, tensor in tensors))

    def publish_sources(self, version: int, sources: Iterable[TensorSource]) -> float:
        """Do as `publish`, with tensors that are read one by one, and of which this rank may have some rows only.

        All ranks call it with the same stored tensors; together they have each element. An error of one rank is
        raised on all.
        """
        if version <= self._highest:
            raise ValueError(f"version {version} is not above {self._highest}, the highest published; raise it")
        began = time.monotonic()
        if self._last_task is not None:
            self._last_task.result()
        folder = self._store / f"{folder_name(version)}.new"
        sources = list(sources)
        stored = (stored for source in sources for stored in source.stored)
        layout = lay_out(stored, version=version, shard_bytes=self._shard_bytes)
        if self._adapter_config is None:
            files = self._write_shards(folder, layout, sources, version)
        else:
            files = self._write_adapter(folder, sources, self._adapter_config, version)
        self._highest = version
        stall_s = time.monotonic() - began
        finishing = self._finisher.submit(self._finish, folder, version, files, stall_s)
        self._last_task = self._finisher.submit(self._keep_pages, finishing, files)
        self._finishing[version] = finishing
        for old in sorted(self._finishing)[:-MAX_REMEMBERED]:
            del self._finishing[old]
        return stall_s

    def completed(self, version: int) -> Published:
        """On rank 0, wait until a recent version is complete; return its digest and size. Raises `NoRoomError`."""
        published = self._finishing[version].result()
        assert published is not None, "rank 0 completes versions"
        return published

    def close(self) -> None:
        """Wait until the last version is complete, stop the threads, and close all files and connections."""
        self._finisher.shutdown()
        self._hashers.shutdown()
        self._writers.close()
        self._pages.close()

    # ---- the copy, for which the learner waits

    def _write_shards(
        self, folder: Path, layout: VersionLayout, sources: Sequence[TensorSource], version: int
    ) -> list["VersionFile"]:
        """Write this rank's rows into the files of a version; return once all ranks have, or raise on all."""
        names = [file.name for file in layout.files]
        num_bytes = sum(file.size for file in layout.files)
        pages = self._writers.share_files(lambda: self._make_files(folder, names), self._pages)
        with self._settled(folder), no_room_errors(self._store, version, num_bytes):
            self._copy(sources, layout, pages)
        return [
            VersionFile(one.name, its, one.size, one.width) for one, its in zip(layout.files, pages, strict=True)
        ]

    def _copy(self, sources: Sequence[TensorSource], layout: VersionLayout, pages: Sequence[MappedFile]) -> None:
        """Copy this rank's rows, and on rank 0 the headers. Raises `OSError` on a full file system."""
        self._copier.copy_rows(sources, layout, lambda file, begin, _: (pages[file], begin))
        if self._leads:
            for file, its in zip(layout.files, pages, strict=True):
                its.write(0, np.frombuffer(file.header(), np.uint8))

    def _write_adapter(
        self, folder: Path, sources: Sequence[TensorSource], config: bytes, version: int
    ) -> list["VersionFile"]:
        """Write the two files of an adapter; returns them."""
        rows = (rows for source in sources for rows in source.read())
        adapter = {name: values.detach().cpu().contiguous() for name, _, values in rows}
        contents = {ADAPTER_WEIGHTS: save(adapter), ADAPTER_CONFIG: config}
        with self._settled(folder), no_room_errors(self._store, version, sum(map(len, contents.values()))):
            pages = self._make_files(folder, list(contents))
            for one, data in zip(pages, contents.values(), strict=True):
                one.write(0, np.frombuffer(data, np.uint8))
        return [VersionFile(name, one, len(contents[name])) for name, one in zip(contents, pages, strict=True)]

    def _make_files(self, folder: Path, names: Sequence[str]) -> list[MappedFile]:
        """Make `folder` with these files, from the spare folder if there is one.

        Deletes files of the spare that the version lacks, or that another process has open.
        """
        with ExitStack() as undo:
            undo.callback(self._discard, folder)
            use_spare(self._store, folder)
            for path in list(folder.iterdir()):
                if path.name not in names or not self._pages.open(path).is_unused:
                    path.unlink()
            pages = [self._pages.open(folder / name) for name in names]
            undo.pop_all()
        return pages

    @contextmanager
    def _settled(self, folder: Path) -> Iterator[None]:
        """Context whose end waits for all ranks, and raises an error of any rank on all; then nothing is left."""
        error: Exception | None = None
        try:
            yield
        except Exception as failed:  # noqa: BLE001 - raised by `agree`
            error = failed
        try:
            self._writers.agree(error, lambda: self._discard(folder))
        except Exception:
            self._copier.drop()
            self._pages.sweep()
            raise

    # ---- on the finisher

    def _finish(
        self, folder: Path, version: int, files: Sequence["VersionFile"], stall_s: float
    ) -> Published | None:
        """Receive rows of other hosts, then hash a share of the chunks; rank 0 writes the manifest and renames.

        Deletes the folder on errors. Returns None on the other ranks.
        """
        published, num_bytes = None, sum(file.size for file in files)
        if self._has_remote:
            with self._settled(folder), no_room_errors(self._store, version, num_bytes):
                receive_rows(self._senders, [file.pages for file in files])
        with self._settled(folder):
            parts = self._writers.gather(lambda: self._hash_share(files))
            if self._leads:
                checksums = self._split_checksums(b"".join(parts), files)
                entries = tuple(file.describe(sums) for file, sums in zip(files, checksums, strict=True))
                manifest = Manifest(version, version_digest(entries), self._chunk_bytes, entries)
                with no_room_errors(self._store, version, num_bytes):
                    describe_version(folder, manifest, checksums)
                folder.rename(self._store / folder_name(version))
                published = Published(version, manifest.digest, num_bytes, stall_s)
        return published

    def _hash_share(self, files: Sequence["VersionFile"]) -> bytes:
        """Cut files to size, and return checksums of this rank's share of all chunks in their order."""
        rank, ranks = self._writers.rank, self._writers.ranks
        counts = [file.num_chunks(self._chunk_bytes) for file in files]
        first, last = (sum(counts) * part // ranks for part in (rank, rank + 1))
        checksums = []
        for file, count in zip(files, counts, strict=True):
            file.pages.set_size(file.size)
            begin, end = (min(max(0, at), count) * self._chunk_bytes for at in (first, last))
            checksums.append(
                hash_range(
                    file.pages, begin, min(end, file.size), chunk_bytes=self._chunk_bytes, threads=self._hashers
                )
            )
            first, last = first - count, last - count
        return b"".join(checksums)

    def _split_checksums(self, checksums: bytes, files: Sequence["VersionFile"]) -> list[bytes]:
        """Split the checksums of a version's chunks by file."""
        found, begin = [], 0
        for file in files:
            end = begin + CHECKSUM_BYTES * file.num_chunks(self._chunk_bytes)
            found.append(checksums[begin:end])
            begin = end
        assert begin == len(checksums), f"{len(checksums)} bytes of checksums, not {begin}"
        return found

    def _keep_pages(self, finishing: "Future[Published | None]", files: Sequence["VersionFile"]) -> None:
        """Map the files of a complete version for reuse, and close deleted files."""
        if finishing.exception() is None:
            for file in files:
                file.pages.keep_mapped()
                self._copier.page_lock(file.pages)
        self._pages.sweep()

    def _discard(self, folder: Path) -> None:
        """On rank 0, drop the copies in flight and delete the folder of a version that failed."""
        self._copier.drop()
        if folder.exists():
            shutil.rmtree(folder)
        self._pages.sweep()


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A written file of a version, e.g. `VersionFile("adapter_config.json", pages, 812)`."""

    name: str
    pages: MappedFile
    size: int  # bytes; the file may be longer until it is cut
    width: Literal[2, 4] = 4  # bytes of an element, for deltas; 4 suits any content

    def num_chunks(self, chunk_bytes: int) -> int:
        """Number of chunks, of which the last may be shorter."""
        return -(-self.size // chunk_bytes)

    def describe(self, checksums: bytes) -> FileEntry:
        """Return the file's entry in the manifest, from the checksums of its chunks."""
        return FileEntry(self.name, self.size, digest_of(checksums), self.width)
