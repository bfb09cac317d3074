"""Files of rows beside the ledger: `metrics.jsonl`, a row a step, and `fleet.jsonl`, a row a second.

Written by the controller; read by the run that goes on from them, by reports and by benchmarks, also while they
grow. Invariants: a line that a crash tore is no row, and costs none of those that a resumed run writes; a number
that is not finite, for which JSON has no word, is null in the file and NaN for every reader.
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

TAIL_BYTES = 1 << 18  # holds more than the longest row

Row = TypeVar("Row")


def open_rows(path: Path) -> BinaryIO:
    """Open a file of rows to append to, made if need be; what a crash tore off is left as a line of its own."""
    file = path.open("a+b")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def append_row(file: BinaryIO, row: msgspec.Struct) -> None:
    """Write the line of a row: its own fields before inherited ones, and none for what is not known."""
    known, own = _without_none(msgspec.to_builtins(row)), type(row).__annotations__
    ordered = sorted(known, key=lambda name: name not in own)
    file.write(msgspec.json.encode({name: known[name] for name in ordered}) + b"\n")


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that are known, also of records inside: null stands for a number that is not finite."""
    known = {name: value for name, value in fields.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, dict) else value for name, value in known.items()}


def read_rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    """Rows of a file; none without it. Raises `ConfigError` with file and line for a row of another form."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for place, line in enumerate(file, 1):
            try:
                yield msgspec.convert(_with_nan(msgspec.json.decode(line)), kind)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{path}: line {place}: {error}; use the release that wrote it") from error
            except (msgspec.DecodeError, UnicodeDecodeError):
                log.info("%s: line %d is torn and left out", path, place)


def read_last(path: Path, kind: type[Row]) -> Row | None:
    """The newest row, without a look at the others; None without any. A line that is being written is no row."""
    for line in reversed(read_tail(path)):
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            return msgspec.convert(_with_nan(msgspec.json.decode(line)), kind)
    return None


def read_tail(path: Path) -> list[bytes]:
    """Whole lines at the end of a file, at most `TAIL_BYTES` of them; none without it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return lines[1:] if size > TAIL_BYTES else lines


def _with_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _with_nan(one) for name, one in value.items()}
    return math.nan if value is None else value
