"""Read a user's data, which may be JSONL, Parquet or Hugging Face data sets, as JSON objects.

`problems` and `demonstrations` call it. Each row becomes one JSON object, in order, whatever its format, with
columns under our names; row i is line i + 1 of a JSONL file (`tests/data/test_sources.py`). Any fault is a
`ConfigError` that names the config's field, the place and the remedy.
"""

import importlib.util
import logging
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from laminar_py.config.data import SourceConfig
from laminar_py.config.registry import in_one_line
from laminar_py.config.section import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

BATCH = 1000  # rows that are converted to objects at a time
QUOTED_CHARS = 80  # of a faulty value in a message
NAMED_FIELDS = 12  # columns in a message

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class DataSource:
    """A source and the config's field that names it, e.g. `source_at("train.jsonl", "data.train")`."""

    field: str
    settings: SourceConfig

    @property
    def path(self) -> str:
        """File, folder, or name on the hub."""
        return self.settings.path

    def place(self, row: int) -> str:
        """Return the place of a row for messages, e.g. `data.train=train.jsonl:7` for row 6."""
        return f"{self.field}={self.path}:{row + 1}"

    def error(self, row: int, problem: str, *, value: object, remedy: str) -> ConfigError:
        """Return the error for a fault of a row; it quotes the beginning of `value`."""
        quoted = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
        if len(quoted) > QUOTED_CHARS:
            quoted = quoted[:QUOTED_CHARS] + "..."
        return ConfigError(f"{self.place(row)}: {problem} in {quoted!r}; {remedy}")


def source_at(path: object, field: str) -> DataSource:
    """Return the source for a config field that is a path, without further settings of a source."""
    return DataSource(field, SourceConfig(path=str(path)))


def read_records(source: DataSource, kind: type[T]) -> Iterator[tuple[int, T, bytes]]:
    """Yield each row's number, its record of type `kind`, and its JSON object, which may have more fields.

    Raises `ConfigError` on an unreadable source, a source without rows, and a missing or mistyped field.
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
            message = str(error).replace("JSON is", "its JSON is", 1)
            is_field = "`$" in message or "missing" in message  # else it is no object
            remedy = (
                "write the field with a value of its type"
                if is_field
                else "write one JSON object a line, in UTF-8"
            )
            raise source.error(row, message[:1].lower() + message[1:], value=line, remedy=remedy) from None
        yield row, record, text
    if empty:
        raise ConfigError(f"{source.field}={source.path}: holds no lines; write one JSON object per line")


def other_fields(line: bytes, known: Collection[str]) -> bytes:
    """Return the JSON object of a row without the fields `known`; values stay as they are written."""
    return msgspec.json.encode({name: value for name, value in raw_fields(line).items() if name not in known})


def raw_fields(line: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a row by name, each value as it is written."""
    return _objects.decode(line)


def written_field(line: bytes, name: str) -> str:
    """Return the value of a field as it is written, e.g. `1.50`. Raises `KeyError`."""
    return bytes(raw_fields(line)[name]).decode()


def _renamed(line: bytes, columns: Mapping[str, str]) -> bytes:
    """Return a row with its columns renamed to the keys of `columns`. Raises `KeyError` for a missing one."""
    fields = _objects.decode(line)
    ours = {name: _column(fields, theirs, theirs) for name, theirs in columns.items()}
    kept = {name: value for name, value in fields.items() if name not in columns.values()}
    return msgspec.json.encode(kept | ours)


def _column(fields: Mapping[str, msgspec.Raw], name: str, path: str) -> msgspec.Raw:
    """Return the value at a dotted name, e.g. `info.answer`. Raises `KeyError` with the whole name, `path`."""
    if name in fields:
        return fields[name]
    outer, _, inner = name.partition(".")
    if not inner or outer not in fields:
        raise KeyError(path)
    try:
        return _column(_objects.decode(fields[outer]), inner, path)
    except msgspec.ValidationError:  # the value is no object
        raise KeyError(path) from None


def read_lines(settings: SourceConfig, field: str) -> Iterator[tuple[int, bytes]]:
    """Yield each row's number and its JSON, without blank lines. `field` is the source's name in the config.

    Raises `ConfigError` if the source is missing or unreadable, or has settings that do not apply to it.
    """
    path = Path(settings.path)
    if path.is_file():
        ignored = {"split": settings.split != "train", "subset": settings.subset, "revision": settings.revision}
        for name in (name for name, value in ignored.items() if value):
            raise ConfigError(f"{field}.{name}: {path} is one file, which has no {name}; leave it out")
        return _read_parquet(path, field) if path.suffix == ".parquet" else _read_jsonl(path)
    if path.is_dir() and settings.revision:
        raise ConfigError(f"{field}.revision: {path} is a folder, which has no revision; leave it out")
    if path.is_dir() or settings.is_hub_name:
        return _read_datasets(settings, field)
    raise ConfigError(
        f"{field}={path}: no such file; name a JSONL or Parquet file, a folder or a name on the hub, or set"
        " data.prepare"
    )


def count_rows(settings: SourceConfig) -> int | None:
    """Count the rows of a JSONL or Parquet file without reading them; None for another source.

    It knows nothing of `read_lines`, so that rows which reading leaves out show.
    """
    path = Path(settings.path)
    if not path.is_file():
        return None
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        return int(ParquetFile(path).metadata.num_rows)
    with path.open("rb") as lines:
        return sum(bool(line.strip(BOM_UTF8 + b" \t\r\n\f\v")) for line in lines)


def _read_jsonl(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each line that is not blank."""
    with path.open("rb") as lines:
        for row, line in enumerate(lines):
            if line := line.removeprefix(BOM_UTF8 if row == 0 else b"").strip():
                yield row, line


def _read_parquet(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a Parquet file as JSON, numbered; `field` is the setting that names the file."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        yield from _json_rows(ParquetFile(path).iter_batches(batch_size=BATCH), f"{field}={path}")
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{field}={path}: not readable as Parquet ({in_one_line(error)}); rewrite it") from None


def _json_rows(tables: Iterable[Any], place: str) -> Iterator[tuple[int, bytes]]:
    """Yield number and JSON of each row in Arrow tables of the source at `place`. Raises `ConfigError`."""
    encoder, row = msgspec.json.Encoder(enc_hook=str), 0
    for table in tables:
        for fields in table.to_pylist():
            for name, value in fields.items():
                try:
                    fields[name] = _plain(value)
                except UnicodeDecodeError:
                    remedy = "write text in UTF-8, or leave the column out"
                    raise ConfigError(
                        f"{place}:{row + 1}: column {name!r} has bytes that are no text; {remedy}"
                    ) from None
            yield row, encoder.encode(fields)
            row += 1


def _plain(value: Any) -> Any:
    """Return bytes as text, and objects without Arrow's nulls for absent fields. Raises `UnicodeDecodeError`."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


def _read_datasets(settings: SourceConfig, field: str) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a folder or hub data set as JSON, numbered, by the optional library `datasets`."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{field}={settings.path}: needs datasets; install laminar-py[data], or name a JSONL or Parquet file"
        )
    datasets = importlib.import_module("datasets")  # untyped
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the error below says it once
    try:
        found = _load(datasets, settings)
    except Exception as error:  # noqa: BLE001 - untrusted files and the network, which may raise anything
        remedy = "fix its name, split, subset or revision, or reach the hub"
        named = {"split": settings.split, "subset": settings.subset, "revision": settings.revision}
        words = ", ".join(f"{name} {value!r}" for name, value in named.items() if value)
        raise ConfigError(
            f"{field}={settings.path}: cannot be loaded with {words} ({in_one_line(error)}); {remedy}"
        ) from None
    return _json_rows(found.with_format("arrow").iter(batch_size=BATCH), f"{field}={settings.path}")


def _load(datasets: Any, settings: SourceConfig) -> Any:
    """Load the split of a saved folder, a folder of files, or a data set on the hub. May raise anything."""
    folder = Path(settings.path)
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    if not saved:
        return datasets.load_dataset(
            settings.path, settings.subset, split=settings.split, revision=settings.revision
        )
    saved_set = datasets.load_from_disk(settings.path)
    if not isinstance(saved_set, dict):
        return saved_set
    if settings.split not in saved_set:
        raise ValueError(f"it has the splits {', '.join(saved_set)}")
    return saved_set[settings.split]
