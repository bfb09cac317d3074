"""The learner's end of the relay: writes a version into the root's store, which the root watches. Synchronous.

Called from the learner's process, which has no event loop. The learner stands still for the copy alone, into pages
that an older version no longer needs; a thread, the finisher, does what may come after it, and lets go of pages.
Invariants: a version's folder appears by rename, complete and with its digests, or leaves nothing behind; whether
the root lives makes no difference to the learner. `publish` begins when the finisher has done all that
came of the one before, and hands over when it ends, so the two are never at pages, shards and copier together.
"""

import errno
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from laminar_py.config.section import ConfigError
from laminar_py.records.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from laminar_py.records.weights import Published
from laminar_py.relay.store.device_copy import TensorCopier
from laminar_py.relay.store.digests import Checksums, hashing_threads, version_digest
from laminar_py.relay.store.pages import KeptPages, Pages
from laminar_py.relay.store.shards import HEADER_BYTES, Shard, VersionFile, header_room
from laminar_py.relay.store.version import describe, folder_name, no_room, writing
from laminar_py.relay.store.versions import complete_versions, take_spare
from laminar_py.relay.wire.messages import MIN_CHUNK_BYTES, Manifest

SHARD_BYTES = 2 * 2**30
MOST_REMEMBERED = 8  # versions that `completed` knows


class Publisher:
    """Publishes versions into the root's store, e.g. `Publisher(store)`.

    `chunk_bytes` is how the whole tree cuts files. With `adapter_config` versions are adapters in peft's format:
    it is their `adapter_config.json`, and all tensors are in one file. Raises `ConfigError` for a bad size.
    """

    def __init__(
        self,
        store: Path,
        *,
        chunk_bytes: int = 4 * 2**20,
        shard_bytes: int = SHARD_BYTES,
        adapter_config: bytes | None = None,
    ) -> None:
        if chunk_bytes < MIN_CHUNK_BYTES:
            raise ConfigError(f"chunk_bytes={chunk_bytes}: too small; set at least {MIN_CHUNK_BYTES}")
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._shard_bytes = shard_bytes
        self._adapter_config = adapter_config
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unfinished in store.glob("v*.new"):
            shutil.rmtree(unfinished)
        self._highest = max(complete_versions(store), default=-1)
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finish")
        self._hashers = hashing_threads()
        self._copier = TensorCopier()
        self._pages = KeptPages()
        self._finishing: dict[int, Future[Published]] = {}  # by version, the last few
        self._keeping: Future[None] | None = None  # the finisher's last task, after which it is idle

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Copy a version out of the learner's memory. Returns how many seconds that took; the tensors may change.

        `tensors` is read once, one tensor at a time. What is left of the digests follows in a
        thread, which `completed` waits for, and the next `publish`. Raises `ValueError` if the number was
        used before, `NoRoomError` if the store's file system is too small; nothing of the version is left then.
        """
        if version <= self._highest:
            raise ValueError(f"version {version} is not above {self._highest}, the highest published; number on")
        began = time.monotonic()
        if self._keeping is not None:
            self._keeping.result()
        folder = self._store / f"{folder_name(version)}.new"
        files: list[VersionFile] = []
        with ExitStack() as undo:
            undo.callback(self._give_up, folder, files)
            self._take_spare(folder)
            try:
                self._write(folder, _each_once(tensors, version), files)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise no_room(self._store, version, sum(file.size for file in files)) from error
            undo.pop_all()
        self._highest = version
        stall_s = time.monotonic() - began
        finishing = self._finisher.submit(self._finish, folder, version, files, stall_s)
        self._keeping = self._finisher.submit(self._keep, finishing, files)
        self._finishing[version] = finishing
        for old in sorted(self._finishing)[:-MOST_REMEMBERED]:
            del self._finishing[old]
        return stall_s

    def completed(self, version: int) -> Published:
        """Wait until one of the last versions is complete in the store. Raises `NoRoomError`."""
        return self._finishing[version].result()

    def close(self) -> None:
        """Finish the last version, and let go of all pages."""
        self._finisher.shutdown()
        self._hashers.shutdown()
        self._pages.close()

    def _take_spare(self, folder: Path) -> None:
        """Make a folder for a new version: of the pages of a retired one, as far as nobody else uses them."""
        take_spare(self._store, folder)
        for path in list(folder.iterdir()):
            if not self._pages.open(path).is_unused:
                path.unlink()

    def _write(self, folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], files: list[VersionFile]) -> None:
        """Finished files, and no others; each is in `files` from its beginning."""
        if self._adapter_config is None:
            self._write_shards(folder, tensors, files)
        else:
            self._write_adapter(folder, list(tensors), files, self._adapter_config)
        for stale in set(folder.iterdir()) - {file.path for file in files}:
            stale.unlink()

    def _write_shards(
        self, folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], files: list[VersionFile]
    ) -> None:
        shard: Shard | None = None
        for name, tensor in tensors:
            if shard is None or not shard.add(name, tensor, shard_bytes=self._shard_bytes):
                if shard is not None:
                    shard.finish()
                shard = self._shard(folder / f"model-{len(files) + 1:05}.safetensors")
                files.append(shard)
                shard.add(name, tensor, shard_bytes=self._shard_bytes)
        if shard is not None:
            shard.finish()

    def _write_adapter(
        self,
        folder: Path,
        tensors: Sequence[tuple[str, torch.Tensor]],
        files: list[VersionFile],
        config: bytes,
    ) -> None:
        """Two files; the tensors are known beforehand, as they are small, so that their header is no larger."""
        shard = self._shard(folder / ADAPTER_WEIGHTS, header_bytes=header_room(tensors))
        files.append(shard)
        for name, tensor in tensors:
            added = shard.add(name, tensor, shard_bytes=sys.maxsize)
            assert added, f"the header of {shard.path} has no room for {name}"
        shard.finish()
        file = VersionFile(*self._open(folder / ADAPTER_CONFIG))
        files.append(file)
        file.write(config)

    def _shard(self, path: Path, *, header_bytes: int = HEADER_BYTES) -> Shard:
        return Shard(*self._open(path), self._copier, header_bytes=header_bytes)

    def _open(self, path: Path) -> tuple[Path, Pages, Checksums]:
        pages = self._pages.open(path)
        return path, pages, Checksums(pages, chunk_bytes=self._chunk_bytes, threads=self._hashers)

    def _finish(self, folder: Path, version: int, written: list[VersionFile], stall_s: float) -> Published:
        with ExitStack() as undo:
            undo.callback(self._give_up, folder, written)
            files, checksums = zip(*(file.entry() for file in written), strict=True)
            manifest = Manifest(version, version_digest(files), self._chunk_bytes, files)
            with writing(self._store, version, manifest.num_bytes):
                describe(folder, manifest, checksums)
            folder.rename(self._store / folder_name(version))
            undo.pop_all()
        return Published(version, manifest.digest, manifest.num_bytes, stall_s)

    def _keep(self, finishing: Future[Published], files: list[VersionFile]) -> None:
        """Have the pages of a complete version at hand for a later one, and let go of those that are none's."""
        if finishing.exception() is None:
            for file in files:
                file.pages.keep()
                self._copier.lock(file.pages)
        self._pages.sweep()

    def _give_up(self, folder: Path, files: list[VersionFile]) -> None:
        """Leave nothing of a version that failed; nobody reads or writes its files any more when they go."""
        self._copier.drop()
        for file in files:
            file.drop()
        if folder.exists():
            shutil.rmtree(folder)
        self._pages.sweep()


def _each_once(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on; `ValueError` where a name comes twice, and at the end if there were none."""
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"tensor {name} comes twice in version {version}; name each once")
        names.add(name)
        yield name, tensor
    if not names:
        raise ValueError(f"version {version} has no tensors; publish at least one")
