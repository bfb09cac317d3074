"""The folder of a host with segments and journals: lists of its files, and their deletion.

The functions run on the host; the controller calls them (`workers.payload`).
"""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from laminar_py.ledger.segments.writer import JOURNAL, SEGMENT, part_of
from laminar_py.records.codec import decode, encode


class SegmentFile(msgspec.Struct, frozen=True, array_like=True):
    """A segment of a host, e.g. `SegmentFile("replica-3-1-17.18f2a.9e41", 65536, 2.5)`."""

    name: str
    num_bytes: int
    age_s: float  # since the last write to it


def segments_in(folder: Path) -> list[Path]:
    """Return the segments in a folder; segments of one process are in order of creation."""
    return sorted(folder.glob(f"*{SEGMENT}"))


def segments_here(folder: str) -> bytes:
    """Return the segments of this host as `list[SegmentFile]`, in the order of `segments_in`."""
    now = time.time()
    found = ((path, path.stat()) for path in segments_in(Path(folder)))
    return encode(
        [SegmentFile(path.name.removesuffix(SEGMENT), stat.st_size, now - stat.st_mtime) for path, stat in found]
    )


def labels_here(folder: str) -> bytes:
    """Return the labels with a segment or a journal on this host, as `list[str]`."""
    paths = (*Path(folder).glob(f"*{SEGMENT}"), *Path(folder).glob(f"*{JOURNAL}"))
    return encode(sorted({part_of(path.name) for path in paths}))


def discard(folder: str, names: bytes) -> bytes:
    """Delete files that match a `list[str]` of patterns, if they still exist; return their number."""
    paths = [path for name in decode(list[str], names) for path in Path(folder).glob(Path(name).name)]
    for path in paths:
        path.unlink(missing_ok=True)
    return encode(len(paths))


def segment_files(names: Iterable[str]) -> list[str]:
    """Return the file names of segments."""
    return [f"{name}{SEGMENT}" for name in names]
