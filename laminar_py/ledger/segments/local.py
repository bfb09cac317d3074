"""Segments of a run in a network folder: on a disk of each host while it runs, in the run's folder afterwards.

`<run>/segments` is then a link, which each host follows by itself:

    to `<runs_local>/laminar-segments-...`   while the run runs, and after a kill: each host has its own segments
    to `segments.kept` beside it             after its end: all kept segments, for readers on any host

The controller creates the link. A host creates its folder with its first file (`make_folder`), and copies its kept
segments at the end (`keep_here`). The link is replaced in one step, after its target is on disk, so it always
leads to everything that the record needs from living hosts (`tests/segments/test_local.py`).
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from laminar_py.records.codec import decode, encode
from laminar_py.records.host import sync

LEAST_FREE = 16 * 2**20  # free bytes of a disk, below which no writer starts
KEPT = ".kept"  # after the name of the link
_COPYING = ".copying"


def is_local(folder: Path) -> bool:
    """Whether each host has its own segments behind this link."""
    return folder.is_symlink() and os.path.isabs(os.readlink(folder))


def make_folder(folder: Path) -> None:
    """Create a private folder, also behind a link. Raises `OSError`."""
    if not folder.is_symlink():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    _make_own(_behind(folder))


def link_local(folder: Path, place: Path) -> None:
    """Link to segments at `place` on each host; copy segments kept from an earlier end to this host.

    Raises `OSError`.
    """
    kept = folder.with_name(f"{folder.name}{KEPT}")
    if folder.is_dir() and not folder.is_symlink():
        folder.rename(kept)  # after a kill here, the next start creates the link
    if kept.is_dir():
        _make_own(place)
        _copy_new(kept.iterdir(), place)
    if not (is_local(folder) and _behind(folder) == place):
        _lead(folder, str(place))


def keep_here(folder: str, names: bytes) -> bytes:
    """Copy files of this host (`list[str]`) to the kept segments; return their number. Raises `OSError`."""
    source = Path(folder)
    kept = source.with_name(f"{source.name}{KEPT}")
    kept.mkdir(mode=0o700, exist_ok=True)
    paths = [path for name in decode(list[str], names) if (path := source / Path(name).name).is_file()]
    _copy_new(paths, kept)
    return encode(len(paths))


def lead_to_kept(folder: Path, names: Iterable[str]) -> None:
    """Link readers to the kept segments, after all hosts copied theirs; delete others. Raises `OSError`."""
    kept = folder.with_name(f"{folder.name}{KEPT}")
    kept.mkdir(mode=0o700, exist_ok=True)
    _lead(folder, kept.name)
    needed = set(names)
    for path in kept.iterdir():
        if path.name not in needed:
            path.unlink()


def drop_local(place: str) -> bytes:
    """Delete this host's folder, whose kept segments were copied."""
    shutil.rmtree(place, ignore_errors=True)
    return b""


def _make_own(place: Path) -> None:
    """Create a private folder on a disk where any user may create folders. Raises `OSError`."""
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(errno.EACCES, "it belongs to another user", str(place))


def _behind(folder: Path) -> Path:
    return folder.parent / os.readlink(folder)


def _lead(folder: Path, target: str) -> None:
    """Replace the link in one step."""
    fresh = folder.with_name(f"{folder.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(folder)
    sync(folder.parent)


def _copy_new(paths: Iterable[Path], folder: Path) -> None:
    """Copy files that are missing or differ in size; a file gets its name when it is complete."""
    for path in paths:
        target = folder / path.name
        if path.name.endswith(_COPYING) or (target.is_file() and target.stat().st_size == path.stat().st_size):
            continue
        unfinished = folder / f"{path.name}{_COPYING}"
        shutil.copyfile(path, unfinished)
        sync(unfinished)
        unfinished.replace(target)
    sync(folder)
