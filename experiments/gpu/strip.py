"""A wheel without folders that a run never reads: `python experiments/gpu/strip.py WHEEL FOLDER...`, in place.

Called by `wheels.sh`. The wheel's RECORD then lists the files that are left in it.
"""

import csv
import io
import sys
import zipfile
from pathlib import Path


def strip(wheel: Path, folders: tuple[str, ...]) -> None:
    """Leave `folders` out of a wheel."""
    prefixes = tuple(f"{folder.strip('/')}/" for folder in folders)
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(partial, "w") as target:
        for entry in source.infolist():
            if not entry.filename.startswith(prefixes):
                data = source.read(entry)
                kept = _without(data, prefixes) if entry.filename.endswith(".dist-info/RECORD") else data
                target.writestr(entry, kept)  # compressed, and executable, as it was
    partial.replace(wheel)


def _without(record: bytes, prefixes: tuple[str, ...]) -> bytes:
    rows = [row for row in csv.reader(io.StringIO(record.decode())) if row and not row[0].startswith(prefixes)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


if __name__ == "__main__":
    strip(Path(sys.argv[1]), tuple(sys.argv[2:]))
