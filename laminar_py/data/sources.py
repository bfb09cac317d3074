"""Problems and other records that a user brings: reading of rows, and the wording of their faults.

Called by `prompts` and `demonstrations`. Invariant: every row is a JSON object, in order, whatever it was stored
as, with its columns under our names; row i is line i + 1 of a JSONL file. Anything else is a `ConfigError` that
names the config field, place and remedy.
"""

import contextlib
import importlib.util
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from laminar_py.config.data import SourceConfig
from laminar_py.config.section import ConfigError

BATCH = 1000  # rows that are turned into objects at a time
REACH_S = 5.0  # of the hub, which is asked once; the library itself tries for half a minute


def read_lines(settings: SourceConfig, field: str) -> Iterator[tuple[int, bytes]]:
    """Rows of a source as JSON, with their numbers; blank lines are left out. `field` is the config's name of it.

    Raises `ConfigError` where there is none, or it cannot be read.
    """
    path = Path(settings.path)
    if path.is_file():
        given = {"split": settings.split != "train", "subset": settings.subset, "revision": settings.revision}
        for name in (name for name, value in given.items() if value):
            raise ConfigError(f"{field}.{name}: {path} is one file, which has none; leave it out")
        return _read_parquet(path, field) if path.suffix == ".parquet" else _read_jsonl(path)
    if path.is_dir() and settings.revision:
        raise ConfigError(f"{field}.revision: {path} is a folder, which has none; leave it out")
    if path.is_dir() or settings.is_hub_name:
        return _read_datasets(settings, field)
    raise ConfigError(
        f"{field}={path}: no such file; name a JSONL or Parquet file, a folder or a name on the hub, or set"
        " data.prepare"
    )


def _read_jsonl(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as lines:
        for row, line in enumerate(lines):
            if line := line.strip():
                yield row, line


def _read_parquet(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        yield from _json_rows(ParquetFile(path).iter_batches(batch_size=BATCH))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{field}={path}: no Parquet file ({_in_one_line(error)}); mend it") from None


def _json_rows(tables: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
    """Rows of tables of Arrow, one after another."""
    encoder, row = msgspec.json.Encoder(enc_hook=str), 0
    for table in tables:
        for fields in table.to_pylist():
            yield row, encoder.encode(fields)
            row += 1


def _read_datasets(settings: SourceConfig, field: str) -> Iterator[tuple[int, bytes]]:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{field}={settings.path}: needs datasets; install laminar-py[data], or name a JSONL or Parquet file"
        )
    datasets = importlib.import_module("datasets")  # untyped
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what it tries again is told once, below
    unreachable = None if Path(settings.path).is_dir() else _hub_fault()
    try:
        with _from_cache(datasets) if unreachable else contextlib.nullcontext():
            found = _load(datasets, settings)
    except Exception as error:  # noqa: BLE001 - untrusted input and the network, in which anything may be raised
        if unreachable:
            raise ConfigError(
                f"{field}={settings.path}: is not in the cache, and the hub cannot be reached ({unreachable});"
                " reach the network, mend the name, or name files that are here"
            ) from None
        remedy = "mend its name, split, subset or revision"
        named = {"split": settings.split, "subset": settings.subset, "revision": settings.revision}
        words = ", ".join(f"{name} {value!r}" for name, value in named.items() if value)
        raise ConfigError(
            f"{field}={settings.path}: cannot be loaded with {words} ({_in_one_line(error)}); {remedy}"
        ) from None
    return _json_rows(found.with_format("arrow").iter(batch_size=BATCH))


def _hub_fault() -> str | None:
    """Reason why the hub gives no answer, a set HF_HUB_OFFLINE among them; None where it gives one."""
    hub = importlib.import_module("huggingface_hub")
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=REACH_S)
    except Exception as error:  # noqa: BLE001 - the network; its client's errors are of another package each year
        return _in_one_line(error)
    return None


@contextlib.contextmanager
def _from_cache(datasets: Any) -> Iterator[None]:
    """Have the library look into its cache alone, as HF_HUB_OFFLINE does, which is read at its import."""
    hub: Any = importlib.import_module("huggingface_hub.constants")
    before = datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE = before


def _load(datasets: Any, settings: SourceConfig) -> Any:
    """The split of a folder, saved or of files, or of a data set on the hub."""
    folder = Path(settings.path)
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    if not saved:
        return datasets.load_dataset(
            settings.path, settings.subset, split=settings.split, revision=settings.revision
        )
    found = datasets.load_from_disk(settings.path)
    if not isinstance(found, dict):
        return found
    if settings.split not in found:
        raise ValueError(f"it has the splits {', '.join(found)}")
    return found[settings.split]


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


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
