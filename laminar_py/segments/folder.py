"""The folder of a host in which segments and journals lie: what is there, and what is deleted.

Its functions run on the host, called by the controller (`workers.payload`).
"""

from collections.abc import Iterable
from pathlib import Path

from laminar_py.records.codec import decode, encode
from laminar_py.segments.writer import SEGMENT


def segments_in(folder: Path) -> list[Path]:
    """Segments there, by name."""
    return sorted(folder.glob(f"*{SEGMENT}"))


def sizes(folder: str) -> bytes:
    """Bytes of each segment of this host by its name, a `dict[str, int]`."""
    return encode({path.name.removesuffix(SEGMENT): path.stat().st_size for path in segments_in(Path(folder))})


def discard(folder: str, names: bytes) -> bytes:
    """Delete files, a `list[str]`; those that are gone are passed over. Their number."""
    paths = [Path(folder) / Path(name).name for name in decode(list[str], names)]
    there = [path for path in paths if path.exists()]
    for path in there:
        path.unlink(missing_ok=True)
    return encode(len(there))


def segment_files(names: Iterable[str]) -> list[str]:
    """File names of segments."""
    return [f"{name}{SEGMENT}" for name in names]
