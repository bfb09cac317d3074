"""Formats that problems come in: JSONL, Parquet, and data sets of the Hugging Face library `datasets`, an extra.

Called by `sources`. Each row is given as a JSON object, with its number.
"""

import contextlib
import importlib.util
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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
