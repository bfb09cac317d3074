"""Row files beside the ledger: `metrics.jsonl`, a row per step, and `fleet.jsonl`, rows at equal intervals.

The controller writes them; a resumed run, reports and benchmarks read them, also while they grow. Readers skip a
line that a crash tore. A number that is not finite is null in the file, since JSON cannot express it, and NaN for
readers (`tests/telemetry/test_stats.py`).
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from laminar_py.config.section import ConfigError

log = logging.getLogger(__name__)

TAIL_BYTES = 1 << 18  # longer than any row

Row = TypeVar("Row")


def open_rows(path: Path) -> BinaryIO:
    """Open or create a row file for appending; end a line that a crash tore."""
    file = path.open("a+b")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def append_row(file: BinaryIO, row: msgspec.Struct) -> None:
    """Write a row as a line: fields of its class before inherited fields, without fields that are None."""
    known, own = _without_none(msgspec.to_builtins(row)), type(row).__annotations__
    ordered = sorted(known, key=lambda name: name not in own)
    file.write(msgspec.json.encode({name: known[name] for name in ordered}) + b"\n")


def halve_rows(path: Path) -> None:
    """Delete every other row of a file that nobody appends to; a reader sees all rows or half of them."""
    kept = path.with_name(f"{path.name}.new")
    with path.open("rb") as file:
        kept.write_bytes(b"".join(list(file)[1::2]))
    os.replace(kept, path)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Remove fields that are None, in nested records too, since null stands for a number that is not finite."""
    known = {name: value for name, value in fields.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, dict) else value for name, value in known.items()}


def read_rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    """Iterate over the rows of a file, none if it is missing. Raises `ConfigError` for a row of another type."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for place, line in enumerate(file, 1):
            try:
                yield _decode_row(line, kind)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{path}: line {place}: {error}; use the release that wrote it") from error
            except (msgspec.DecodeError, UnicodeDecodeError):
                log.info("%s: line %d is incomplete after a crash and is skipped", path, place)


def read_last(path: Path, kind: type[Row]) -> Row | None:
    """Return the last complete row without reading the others; None without any."""
    for line in reversed(read_tail(path)):
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            return _decode_row(line, kind)
    return None


def read_tail(path: Path) -> list[bytes]:
    """Return the lines in the last `TAIL_BYTES` of a file, none if it is missing; the last may be torn."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return lines[1:] if size > TAIL_BYTES else lines


def _decode_row(line: bytes, kind: type[Row]) -> Row:
    return msgspec.convert(_with_nan(msgspec.json.decode(line)), kind, str_keys=True)


def _with_nan(value: object) -> object:
    """Return a decoded row with NaN for null, in nested records too."""
    if isinstance(value, dict):
        return {name: _with_nan(one) for name, one in value.items()}
    return math.nan if value is None else value
