"""Version folders of one node on disk: what is complete, what arrives, what is pinned and what may go.

Used by the node (all of it) and the publisher (the spare). Invariant: a folder `v<N>`
exists only if each of its files has the digest that its manifest says; everything else has a suffix:
`v<N>.part` arrives, `v<N>.*.old` is being deleted, `v<N>.new` is the publisher's and never touched here. One
retired version is kept as `spare`, for the next to be written over it: by the publisher in the root's store.
"""

import ctypes
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from laminar_py.relay.store.pages import Pages
from laminar_py.relay.store.version import CHECKSUMS, MANIFEST, StoredVersion, folder_name, no_room, writing
from laminar_py.relay.wire.messages import Manifest

log = logging.getLogger(__name__)

SPARE = "spare"  # folder of a retired version that may be written over
_PIN = "pin-"
_MOVED_TO = 0x80  # inotify's event of a name that something got by a rename
_COMPLETE = re.compile(r"v(\d+)")


def take_spare(store: Path, folder: Path) -> None:
    """Make `folder` for a new version, with the files of a retired one in it if there is one."""
    try:
        (store / SPARE).rename(folder)
    except FileNotFoundError:
        folder.mkdir(mode=0o700)
        return
    for name in (MANIFEST, CHECKSUMS):
        (folder / name).unlink(missing_ok=True)


def reuse(folder: Path, sizes: Mapping[str, int]) -> None:
    """Keep of a spare the files with these names that nobody uses, no longer than that."""
    for path in list(folder.iterdir()):
        pages = Pages(path)
        if path.name in sizes and pages.is_unused:
            pages.cut(min(pages.size, sizes[path.name]))
        else:
            path.unlink()
        pages.close()


def watch_names(store: Path) -> int:
    """Descriptor that gets readable when something in a store gets its name (inotify). Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(store), _MOVED_TO) < 0:
        number = ctypes.get_errno()
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(number, os.strerror(number), str(store))
    return descriptor


def complete_versions(store: Path) -> list[int]:
    """Versions in a store, ascending."""
    found = (_COMPLETE.fullmatch(path.name) for path in store.iterdir())
    return sorted(int(match[1]) for match in found if match)


class Store:
    """The versions of one node, e.g. `Store(Path("/dev/shm/run/relay-1"), keep_versions=2)`."""

    def __init__(self, path: Path, *, keep_versions: int) -> None:
        self.path = path
        self.complete: dict[int, StoredVersion] = {}
        self._keep_versions = keep_versions
        self._pins: dict[str, int] = {}
        self._doomed: dict[Path, int] = {}  # folder that is being deleted -> bytes that this will free

    @property
    def newest(self) -> int:
        """The highest complete version, -1 if there is none."""
        return max(self.complete, default=-1)

    def open(self) -> None:
        """Make the folder, throw away what was left unfinished, and find complete versions and pins."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # that of a run
        self.path.mkdir(mode=0o700, exist_ok=True)
        for leftover in (*self.path.glob("v*.part"), *self.path.glob("v*.old")):
            log.info("throwing away %s", leftover)
            shutil.rmtree(leftover, ignore_errors=True)  # an earlier node's thread may be at it, too
        self._pins = {
            path.name.removeprefix(_PIN): int(path.read_text())
            for path in self.path.glob(f"{_PIN}*")
            if not path.name.endswith("~")
        }
        self.discover()

    def discover(self) -> list[StoredVersion]:
        """Complete versions that came into the folder since the last look, ascending."""
        found = []
        for version in complete_versions(self.path):
            if version not in self.complete:
                self.complete[version] = StoredVersion.load(self.path / folder_name(version))
                found.append(self.complete[version])
        return found

    def check_room(self, manifest: Manifest, *, given_back: int) -> None:
        """Raises `NoRoomError` if a version does not fit, although so many bytes are given back for it."""
        spare = self.path / SPARE
        warm = sum(path.stat().st_blocks * 512 for path in spare.iterdir()) if spare.exists() else 0
        room = shutil.disk_usage(self.path).free + sum(self._doomed.values()) + warm + given_back
        if manifest.num_bytes > room:
            raise no_room(self.path, manifest.version, manifest.num_bytes)

    def begin(self, manifest: Manifest) -> StoredVersion:
        """An empty `.part` folder for a version that is to arrive. Raises `NoRoomError`."""
        folder = self.path / f"{folder_name(manifest.version)}.part"
        sizes = {entry.name: entry.size for entry in manifest.files}
        take_spare(self.path, folder)
        reuse(folder, sizes)
        with writing(self.path, manifest.version, manifest.num_bytes):
            for name, size in sizes.items():  # nobody makes one later: it would lack what came before
                pages = Pages(folder / name)
                pages.cut(size)
                pages.close()
        return StoredVersion(manifest, folder, complete=False)

    def commit(self, arrived: StoredVersion) -> None:
        """Give a version its name, once all digests hold. Raises `NoRoomError`."""
        arrived.describe()
        arrived.folder = arrived.folder.rename(self.path / folder_name(arrived.manifest.version))
        self.complete[arrived.manifest.version] = arrived

    def pin(self, name: str, version: int) -> None:
        """Hold a version for a subscriber, instead of the one held for it so far; survives a crash.

        Raises `NoRoomError`.
        """
        unfinished = self.path / f"{_PIN}{name}~"
        with writing(self.path, version, len(str(version))):
            unfinished.write_text(str(version))
        unfinished.rename(self.path / f"{_PIN}{name}")
        self._pins[name] = version

    def unpin(self, name: str) -> None:
        """Hold nothing for that subscriber any more."""
        if self._pins.pop(name, None) is not None:
            (self.path / f"{_PIN}{name}").unlink(missing_ok=True)

    def surplus(self, held: set[int]) -> list[StoredVersion]:
        """Complete versions that are neither among the newest, nor pinned, nor in `held`."""
        kept = held | set(self._pins.values()) | set(sorted(self.complete)[-self._keep_versions :])
        return [stored for version, stored in sorted(self.complete.items()) if version not in kept]

    def retire(self, stored: StoredVersion) -> Path | None:
        """Take a version out, complete or not. Returns the folder for `delete`; None if it is the spare now."""
        version = stored.manifest.version
        if self.complete.get(version) is stored:
            del self.complete[version]
        stored.forget()
        if not stored.folder.exists():
            return None  # somebody else deleted it
        with suppress(OSError):  # there is a spare
            stored.folder = stored.folder.rename(self.path / SPARE)
            return None
        doomed = Path(tempfile.mkdtemp(prefix=f"{folder_name(version)}.", suffix=".old", dir=self.path))
        stored.folder = stored.folder.rename(doomed / stored.folder.name)
        self._doomed[doomed] = stored.allocated
        return doomed

    def delete(self, doomed: Path) -> None:
        """Free the memory of what was retired; slow enough (10 GB/s) for a thread."""
        shutil.rmtree(doomed, ignore_errors=True)  # what is left of it goes at the next start
        del self._doomed[doomed]
