"""The version folders of a node: complete, arriving and retired versions, and what subscribers hold.

Nodes use all of it. The publisher uses the spare folder and the functions that describe a folder. A version folder
holds safetensors files, `manifest.json` with their sizes and digests, and `checksums` of all chunks, from which a
restarted node knows its chunks. Folders are private to the user.

    `v<N>.new`    the publisher writes version N; nodes never touch it
    `v<N>.part`   version N arrives
    `v<N>`        complete: each file has the digest that the manifest names
                  (`tests/relay/test_store.py::test_a_version_has_its_name_only_after_commit`)
    `v<N>.*.old`  is being deleted
    `spare`       one retired version, whose files the next version overwrites: warm pages are faster than new
                  ones, and where all deltas since are kept, only changed elements are written
    `pin-<name>`  the version that a subscriber holds
    `changes-<N>.safetensors`  what version N changed in its base (`relay/changes.py`), as long as N is kept
    `spare-changes`  one retired file of changes, whose pages the next one overwrites
"""

import ctypes
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from laminar_py.relay.changes import ChangesFile
from laminar_py.relay.mapped_file import MappedFiles
from laminar_py.relay.messages import Manifest
from laminar_py.relay.stored_version import (
    CHECKSUMS,
    MANIFEST,
    ChunkDelta,
    StoredVersion,
    no_room,
    no_room_errors,
)

log = logging.getLogger(__name__)

SPARE = "spare"
_PIN = "pin-"
_CHANGES = "changes-"
_SPARE_CHANGES = "spare-changes"
_IN_MOVED_TO = 0x80  # inotify's event for a name that appears by a rename
_COMPLETE = re.compile(r"v(\d+)")


def folder_name(version: int) -> str:
    """Folder name of a complete version, e.g. `v7`."""
    return f"v{version}"


def complete_versions(store: Path) -> list[int]:
    """Numbers of the complete versions in a store, ascending."""
    matches = (_COMPLETE.fullmatch(path.name) for path in store.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def use_spare(store: Path, folder: Path) -> None:
    """Make `folder` for a new version: the spare folder under a new name, or an empty one if there is none."""
    try:
        (store / SPARE).rename(folder)
    except FileNotFoundError:
        folder.mkdir(mode=0o700)
        return
    for name in (MANIFEST, CHECKSUMS):
        (folder / name).unlink(missing_ok=True)


def watch_folder(store: Path) -> int:
    """Return a descriptor that becomes readable when a rename adds a name to a store. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(store), _IN_MOVED_TO) < 0:
        number = ctypes.get_errno()
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(number, os.strerror(number), str(store))
    return descriptor


class VersionStore:
    """The versions of one node, e.g. `VersionStore(Path("/dev/shm/run/relay-1"), keep_versions=2)`."""

    def __init__(self, path: Path, *, keep_versions: int) -> None:
        self.path = path
        self.complete: dict[int, StoredVersion] = {}
        self.ready: dict[int, StoredVersion] = {}  # versions with changes whose folders are in the making
        self.comparing: set[int] = set()  # versions that may soon have changes
        self._changes: dict[int, tuple[int, Path]] = {}  # version -> base and change file
        self._keep_versions = keep_versions
        self._pins: dict[str, int] = {}  # subscriber -> version
        self._reading: dict[str, list[int]] = {}  # subscriber -> versions whose changes its pin holds
        self._spare: StoredVersion | None = None  # the version in the spare folder, if that is known
        self._deleting: dict[Path, int] = {}  # folder -> bytes that its deletion will free
        self._files = MappedFiles()

    @property
    def newest(self) -> int:
        """The highest complete version, -1 if there is none."""
        return max(self.complete, default=-1)

    @property
    def newest_ready(self) -> int:
        """The highest version that is complete or whose changes are, -1 if there is none."""
        return max(self.newest, *self.ready, -1)

    def find(self, version: int) -> StoredVersion | None:
        """Return a version that is complete or whose changes are; None for any other."""
        return self.complete.get(version) or self.ready.get(version)

    def open(self) -> None:
        """Make the folder, delete what an earlier process left unfinished, and find complete versions and pins."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the folder of the run
        self.path.mkdir(mode=0o700, exist_ok=True)
        for leftover in (*self.path.glob("v*.part"), *self.path.glob("v*.old")):
            log.info("deleting the unfinished %s", leftover)
            shutil.rmtree(leftover, ignore_errors=True)  # a thread of an earlier node may delete it, too
        for path in (*self.path.glob(f"{_CHANGES}*"), *self.path.glob(_SPARE_CHANGES)):
            path.unlink()
        self._pins = {
            path.name.removeprefix(_PIN): int(path.read_text())
            for path in self.path.glob(f"{_PIN}*")
            if not path.name.endswith("~")
        }
        self.discover()

    def discover(self) -> list[StoredVersion]:
        """Load the complete versions that appeared in the folder since the last call; returns them, ascending."""
        appeared = []
        for version in complete_versions(self.path):
            if version not in self.complete:
                self.complete[version] = StoredVersion.load(self.path / folder_name(version))
                appeared.append(self.complete[version])
        return appeared

    def check_room(self, manifest: Manifest, *, freed_bytes: int) -> None:
        """Raise `NoRoomError` if a version does not fit, even after the caller has freed `freed_bytes`.

        A version goes before files of changes, so the spare one is deleted where room is short.
        """
        spare = self.path / SPARE
        reused = sum(path.stat().st_blocks * 512 for path in spare.iterdir()) if spare.exists() else 0
        needed = manifest.num_bytes - reused - freed_bytes - sum(self._deleting.values())
        if needed > shutil.disk_usage(self.path).free:
            (self.path / _SPARE_CHANGES).unlink(missing_ok=True)
        if needed > shutil.disk_usage(self.path).free:
            raise no_room(self.path, manifest.version, manifest.num_bytes)

    def begin(self, manifest: Manifest, base: StoredVersion | None = None) -> StoredVersion:
        """Make the `.part` folder of a version that will arrive, with all its files, perhaps as deltas to `base`.

        Raises `NoRoomError`.
        """
        folder = self.path / f"{folder_name(manifest.version)}.part"
        sizes = {entry.name: entry.size for entry in manifest.files}
        use_spare(self.path, folder)
        kept = _keep_usable_files(folder, sizes, self._files)
        older = None if base is None else self._deltas_between(self._spare, base)
        self._spare = None
        stored = StoredVersion(manifest, folder, complete=False)
        with no_room_errors(self.path, manifest.version, manifest.num_bytes):
            # All files exist from here on, and stay open: writes never make a new file that lacks earlier chunks.
            stored.pages = [self._files.open(folder / name) for name in sizes]
            for pages, size in zip(stored.pages, sizes.values(), strict=True):
                pages.set_size(size)
                pages.is_arriving = True
        if base is not None:
            stored.build_on(base.manifest.version, older, {i for i, name in enumerate(sizes) if name in kept})
        return stored

    def _deltas_between(
        self, old: StoredVersion | None, base: StoredVersion
    ) -> list[dict[tuple[int, int], ChunkDelta]] | None:
        """Deltas that turn `old` into `base`, one after the other; None if there are none."""
        if old is None or not base.manifest.has_layout_of(old.manifest):
            return None
        found, stored = list[dict[tuple[int, int], ChunkDelta]](), base
        while stored.base is not None and stored.base != old.manifest.version and stored.base in self.complete:
            found.append(stored.deltas)
            stored = self.complete[stored.base]
        return [stored.deltas, *found[::-1]] if stored.base == old.manifest.version else None

    def commit(self, arrived: StoredVersion) -> None:
        """Make a verified version complete: describe it and rename its folder. Raises `NoRoomError`."""
        arrived.describe()
        arrived.end_writes()
        arrived.folder = arrived.folder.rename(self.path / folder_name(arrived.manifest.version))
        self.complete[arrived.manifest.version] = arrived
        self.ready.pop(arrived.manifest.version, None)

    def keep_mapped(self, stored: StoredVersion) -> None:
        """Map the files of a complete version, for the next one to overwrite. Call this in a thread."""
        for pages in stored.pages:
            if not pages.is_deleted:
                pages.keep_mapped()
        self._files.sweep()

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def begin_changes(self, stored: StoredVersion, base: StoredVersion) -> ChangesFile | None:
        """Begin the file of a version's changes in `base`; None if it cannot be made.

        It leaves room for the rest of an arriving version, and for a next version that finds no spare folder.
        """
        manifest = stored.manifest
        reserve = 0 if (self.path / SPARE).exists() else manifest.num_bytes
        if manifest.version not in self.complete:
            reserve = max(0, manifest.num_bytes - stored.allocated_bytes)
        return ChangesFile.begin(
            self._changes_path(manifest.version),
            base,
            manifest,
            spare=self.path / _SPARE_CHANGES,
            reserve=reserve,
        )

    def _changes_path(self, version: int) -> Path:
        return self.path / f"{_CHANGES}{version}.safetensors"

    def add_changes(self, stored: StoredVersion, base: int) -> None:
        """Offer the finished file with what a complete or arriving version changed in `base`."""
        version = stored.manifest.version
        self._changes[version] = base, self._changes_path(version)
        if version not in self.complete:
            self.ready[version] = stored

    def changes_since(self, base: int, version: int) -> dict[int, str] | None:
        """Change files from `base` to `version` in order, by version; None if one lacks."""
        found: dict[int, str] = {}
        while version > base and version in self._changes:
            before, path = self._changes[version]
            found[version], version = str(path), before
        return dict(reversed(found.items())) if found and version == base else None

    def pin(self, name: str, version: int, changes: Iterable[int] = ()) -> None:
        """Pin a version and files of `changes` for subscriber `name`, which ends its earlier pin.

        The version's pin survives a crash. Raises `NoRoomError`.
        """
        unfinished = self.path / f"{_PIN}{name}~"
        with no_room_errors(self.path, version, len(str(version))):
            unfinished.write_text(str(version))
        unfinished.rename(self.path / f"{_PIN}{name}")
        self._pins[name], self._reading[name] = version, list(changes)
        self._sweep_changes()

    def unpin(self, name: str) -> None:
        """Remove the pin of subscriber `name`, if there is one."""
        if self._pins.pop(name, None) is not None:
            (self.path / f"{_PIN}{name}").unlink(missing_ok=True)
            self._reading.pop(name, None)
            self._sweep_changes()

    def _sweep_changes(self) -> None:
        """Retire change files whose versions are gone, unless a subscriber may read them."""
        needed = {*self.complete, *self.ready}.union(*self._reading.values())
        for version in [version for version in self._changes if version not in needed]:
            path, spare = self._changes.pop(version)[1], self.path / _SPARE_CHANGES
            if spare.exists():
                self._files.open(spare)  # so that its pages are freed by `delete`, in a thread
            with suppress(FileNotFoundError):
                path.replace(spare)

    def surplus(self, needed: set[int]) -> list[StoredVersion]:
        """Complete versions that are neither among the newest `keep_versions`, nor pinned, nor `needed`."""
        staying = needed | set(self._pins.values()) | set(sorted(self.complete)[-self._keep_versions :])
        return [stored for version, stored in sorted(self.complete.items()) if version not in staying]

    def retire(self, stored: StoredVersion) -> Path | None:
        """Take a version out of the store, complete or not.

        Returns the folder to `delete`; None if it became the spare folder or is gone already.
        """
        version = stored.manifest.version
        complete = self.complete.get(version) is stored
        if complete:
            del self.complete[version]
        self.ready.pop(version, None)
        self._sweep_changes()
        stored.free_memory()  # before another process may take the folder: mapped files are not written over
        stored.end_writes()
        if not stored.folder.exists():
            return None
        with suppress(OSError):  # there is a spare folder already
            stored.folder = stored.folder.rename(self.path / SPARE)
            self._spare = stored if complete else None
            return None
        try:
            doomed = Path(tempfile.mkdtemp(prefix=f"{folder_name(version)}.", suffix=".old", dir=self.path))
            stored.folder = stored.folder.rename(doomed / stored.folder.name)
        except OSError as error:
            log.error("version %d was not moved away: %s", version, error)
            shutil.rmtree(stored.folder, ignore_errors=True)
            return None
        self._deleting[doomed] = stored.allocated_bytes
        return doomed

    def delete(self, doomed: Path | None) -> None:
        """Delete a folder that `retire` returned, and replaced spares. In a thread: this frees about 10 GB/s."""
        if doomed is not None:
            shutil.rmtree(doomed, ignore_errors=True)  # `open` deletes the rest at the next start
        self._files.sweep()  # this frees files that are still open
        if doomed is not None:
            del self._deleting[doomed]


def _keep_usable_files(folder: Path, sizes: Mapping[str, int], files: MappedFiles) -> set[str]:
    """Delete a folder's files that `sizes` (bytes by name) lacks or a process has open; cut the others to size.

    Returns the names of files that had this size and are mapped as a whole.
    """
    kept = set()
    for path in list(folder.iterdir()):
        pages = files.open(path)
        if path.name in sizes and pages.is_unused:
            if pages.size == sizes[path.name] and pages.mapped_view(0, pages.size) is not None:
                kept.add(path.name)
            pages.set_size(min(pages.size, sizes[path.name]))
        else:
            path.unlink()
    files.sweep()
    return kept
