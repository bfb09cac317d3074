"""Problems and other records that a user brings: reading of rows, and the wording of their faults.

Called by `prompts` and `demonstrations`. Invariant: every row is a JSON object, in order, whatever it was stored
as, with its columns under our names; row i is line i + 1 of a JSONL file. Anything else is a `ConfigError` that
names the config field, place and remedy.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from laminar_py.config.data import SourceConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.formats import read_lines

T = TypeVar("T", bound=msgspec.Struct)

QUOTED_CHARS = 80
NAMED_FIELDS = 12  # of a row that lacks one

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class DataSource:
    """A source and the field of the config that names it, e.g. `source_at("train.jsonl", "data.train")`."""

    field: str
    settings: SourceConfig

    @property
    def path(self) -> str:
        """File, folder, or name on the hub."""
        return self.settings.path

    def place(self, row: int) -> str:
        """`data.train=train.jsonl:7` for row 6."""
        return f"{self.field}={self.path}:{row + 1}"

    def error(self, row: int, problem: str, *, value: object, remedy: str) -> ConfigError:
        """A fault of a row; `value` is quoted, cut where it is long."""
        quoted = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
        if len(quoted) > QUOTED_CHARS:
            quoted = quoted[:QUOTED_CHARS] + "..."
        return ConfigError(f"{self.place(row)}: {problem} in {quoted!r}; {remedy}")


def source_at(path: object, field: str) -> DataSource:
    """Source of a file that the config field names by no more than its path."""
    return DataSource(field, SourceConfig(path=str(path)))


def read_records(source: DataSource, kind: type[T]) -> Iterator[tuple[int, T, bytes]]:
    """Records of `kind`, one of each row, with the row and its JSON object, which may have more fields.

    Raises `ConfigError` on what cannot be read, has no rows, and on a missing or mistyped field.
    """
    decoder, columns, empty = msgspec.json.Decoder(kind), source.settings.columns, True
    for row, line in read_lines(source.settings, source.field):
        empty = False
        try:
            text = _renamed(line, columns) if columns else line
            record = decoder.decode(text)
        except KeyError as error:
            there = ", ".join(list(_objects.decode(line))[:NAMED_FIELDS])
            raise ConfigError(
                f"{source.place(row)}: no column {error.args[0]!r}, which {source.field}.columns names;"
                f" choose from {there}"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise source.error(row, _lower(str(error)), value=line, remedy=_remedy(source, kind)) from None
        yield row, record, text
    if empty:
        raise ConfigError(f"{source.field}={source.path}: holds no lines; write one JSON object per line")


def other_fields(line: bytes, known: Collection[str]) -> bytes:
    """The fields of a row but those `known`, as a JSON object; their values stay as they are written."""
    return msgspec.json.encode({name: value for name, value in raw_fields(line).items() if name not in known})


def raw_fields(line: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a row, each as it is written."""
    return _objects.decode(line)


def written_field(line: bytes, name: str) -> str:
    """The value of a field as the row has it, e.g. `1.50`."""
    return bytes(raw_fields(line)[name]).decode()


def _renamed(line: bytes, columns: Mapping[str, str]) -> bytes:
    """The row with columns under our names; a column that an object holds stays in that too. `KeyError` if one is
    not there."""
    given = _objects.decode(line)
    ours = {name: _value(given, theirs, theirs) for name, theirs in columns.items()}
    taken = set(columns.values())
    return msgspec.json.encode({name: value for name, value in given.items() if name not in taken} | ours)


def _value(fields: Mapping[str, msgspec.Raw], name: str, whole: str) -> msgspec.Raw:
    if name in fields:
        return fields[name]
    outer, _, inner = name.partition(".")
    if not inner or outer not in fields:
        raise KeyError(whole)
    try:
        return _value(_objects.decode(fields[outer]), inner, whole)
    except msgspec.ValidationError:  # no object
        raise KeyError(whole) from None


def _remedy(source: DataSource, kind: type[msgspec.Struct]) -> str:
    form = ", ".join(f'"{field.name}": ...' for field in msgspec.structs.fields(kind) if field.required)
    return f"write {{{form}}} with strings as values, in UTF-8"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
