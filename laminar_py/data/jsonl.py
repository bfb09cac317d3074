"""JSONL files that a user wrote. Owns reading and the wording of faults for `prompts` and `demonstrations`.

Invariant: what it returns has one record for each line that is not blank, in order, every field of the declared
type, with its row; row i is line i + 1 of the file. Anything else is a `ConfigError` that names the config field,
file and line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_py.config.section import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

QUOTED_CHARS = 80

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class JsonlFile:
    """A file and the config field that names it, e.g. `JsonlFile(Path("train.jsonl"), "data.train")`."""

    path: Path
    field: str

    def place(self, row: int) -> str:
        """`data.train=train.jsonl:7` for row 6."""
        return f"{self.field}={self.path}:{row + 1}"

    def error(self, row: int, problem: str, *, value: object, remedy: str) -> ConfigError:
        """A fault of a row; `value` is quoted, cut where it is long."""
        quoted = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
        if len(quoted) > QUOTED_CHARS:
            quoted = quoted[:QUOTED_CHARS] + "..."
        return ConfigError(f"{self.place(row)}: {problem} in {quoted!r}; {remedy}")


def read_jsonl(source: JsonlFile, kind: type[T]) -> list[tuple[int, T, bytes]]:
    """Read one record of `kind` per line, each with its row, and the line, which may have more fields.

    Blank lines are ignored.

    Raises `ConfigError` on a missing or empty file, broken JSON, and a missing or mistyped field.
    """
    if not source.path.is_file():
        raise ConfigError(f"{source.field}={source.path}: no such file; name a JSONL file or set data.prepare")
    decoder = msgspec.json.Decoder(kind)
    records = []
    for row, line in enumerate(source.path.read_bytes().splitlines()):
        if not line.strip():
            continue
        try:
            records.append((row, decoder.decode(line), line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            form = ", ".join(f'"{field.name}": ...' for field in msgspec.structs.fields(kind) if field.required)
            remedy = f"write {{{form}}} with strings as values, in UTF-8"
            raise source.error(row, _lower(str(error)), value=line, remedy=remedy) from None
    if not records:
        raise ConfigError(f"{source.field}={source.path}: holds no lines; write one JSON object per line")
    return records


def other_fields(line: bytes, kind: type[msgspec.Struct]) -> bytes:
    """The fields of a line that `kind` lacks, as a JSON object; their values stay as they are written."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    given = _objects.decode(line)
    return msgspec.json.encode({name: value for name, value in given.items() if name not in known})


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
