"""Segments of a run whose folder lies over a network: on a disk of each host while it runs, in that folder after.

`<run>/segments` is then a link, which every host follows for itself:

    to `<runs_local>/laminar-segments-...`   the run goes on, or was killed: each host has what it wrote
    to `segments.kept` beside it             it has ended: all that is kept is there, for readers on any host

The controller links, hosts make their folder with the first file (`make_folder`) and copy what is kept at the end
(`keep_here`). Invariant: the link is replaced in one step, once all that it is to lead to is on disk; so at any
moment it leads to all that the record needs, as far as hosts live.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from laminar_py.records.codec import decode, encode
from laminar_py.records.host import sync

LEAST_FREE = 16 * 2**20  # bytes of a disk without which nobody begins to write there
KEPT = ".kept"  # after the name of the link
_COPYING = ".copying"


def is_local(folder: Path) -> bool:
    """True where each host has segments of its own behind this name."""
    return folder.is_symlink() and os.path.isabs(os.readlink(folder))


def make_folder(folder: Path) -> None:
    """Have a folder of this user alone, also behind a link. Raises `OSError`."""
    if not folder.is_symlink():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    _make_own(_behind(folder))


def link_local(folder: Path, place: Path) -> None:
    """Have each host's segments at `place` from now on; this host gets what was kept at the end of before.

    Raises `OSError`.
    """
    kept = folder.with_name(f"{folder.name}{KEPT}")
    if folder.is_dir() and not folder.is_symlink():
        folder.rename(kept)  # killed here, the next start links as this one was to
    if kept.is_dir():
        _make_own(place)
        _copy_new(kept.iterdir(), place)
    if not (is_local(folder) and _behind(folder) == place):
        _lead(folder, str(place))


def keep_here(folder: str, names: bytes) -> bytes:
    """Copy these files of this host, a `list[str]`, to what is kept of the run; their number. Raises `OSError`."""
    source = Path(folder)
    kept = source.with_name(f"{source.name}{KEPT}")
    kept.mkdir(mode=0o700, exist_ok=True)
    paths = [path for name in decode(list[str], names) if (path := source / Path(name).name).is_file()]
    _copy_new(paths, kept)
    return encode(len(paths))


def lead_to_kept(folder: Path, names: Iterable[str]) -> None:
    """Have readers find what is kept, these files, once all hosts have copied theirs. Raises `OSError`."""
    kept = folder.with_name(f"{folder.name}{KEPT}")
    kept.mkdir(mode=0o700, exist_ok=True)
    _lead(folder, kept.name)
    needed = set(names)
    for path in kept.iterdir():
        if path.name not in needed:
            path.unlink()


def drop_local(place: str) -> bytes:
    """Delete this host's folder, all of which is kept."""
    shutil.rmtree(place, ignore_errors=True)
    return b""


def _make_own(place: Path) -> None:
    """Have a folder of this user alone on a disk where anybody may make one. Raises `OSError`."""
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(errno.EACCES, "it is another user's", str(place))


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
    """Copy files that are not there yet in their size; each is whole once it has its name."""
    for path in paths:
        target = folder / path.name
        if path.name.endswith(_COPYING) or (target.is_file() and target.stat().st_size == path.stat().st_size):
            continue
        unfinished = folder / f"{path.name}{_COPYING}"
        shutil.copyfile(path, unfinished)
        sync(unfinished)
        unfinished.replace(target)
    sync(folder)
