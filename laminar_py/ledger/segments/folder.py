"""The folder of a host in which segments and journals lie: what is there, and what is deleted.

Its functions run on the host, called by the controller (`workers.payload`).
"""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from laminar_py.ledger.segments.writer import JOURNAL, SEGMENT, part_of
from laminar_py.records.codec import decode, encode


class SegmentFile(msgspec.Struct, frozen=True, array_like=True):
    """A segment that is there, e.g. `SegmentFile("replica-3-1-17.18f2a.9e41", 65536, 2.5)`."""

    name: str
    num_bytes: int
    age_s: float  # since something was written to it


def segments_in(folder: Path) -> list[Path]:
    """Segments there, those of a part in the order of their making."""
    return sorted(folder.glob(f"*{SEGMENT}"))


def segments_here(folder: str) -> bytes:
    """Segments of this host, a list of `SegmentFile` in the order of their making."""
    now = time.time()
    found = ((path, path.stat()) for path in segments_in(Path(folder)))
    return encode(
        [SegmentFile(path.name.removesuffix(SEGMENT), stat.st_size, now - stat.st_mtime) for path, stat in found]
    )


def labels_here(folder: str) -> bytes:
    """Labels of which there is a segment or a journal on this host, a `list[str]`."""
    paths = (*Path(folder).glob(f"*{SEGMENT}"), *Path(folder).glob(f"*{JOURNAL}"))
    return encode(sorted({part_of(path.name) for path in paths}))


def discard(folder: str, names: bytes) -> bytes:
    """Delete files by their names, a `list[str]` of patterns; their number. Some may be gone already."""
    paths = [path for name in decode(list[str], names) for path in Path(folder).glob(Path(name).name)]
    for path in paths:
        path.unlink(missing_ok=True)
    return encode(len(paths))


def segment_files(names: Iterable[str]) -> list[str]:
    """File names of segments."""
    return [f"{name}{SEGMENT}" for name in names]
