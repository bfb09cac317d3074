"""Mark of a complete checkpoint: `complete.json`, written last. No torch: the controller reads it too.

Called by whoever writes or reads checkpoints. Invariant: a folder that `read_marker` accepts has every file that
was written, in full length.
"""

import shutil
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.records.disk import sync, write_file

MARKER = "complete.json"


class Adapted(msgspec.Struct, frozen=True):
    """Base and shape of adapters, e.g. `Adapted("9f2c...", 16, 32.0, ("q_proj", "v_proj"))`."""

    base: str  # digest of the weights below them
    rank: int
    alpha: float
    targets: tuple[str, ...]  # sorted


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Models that a state fits, e.g. `Architecture(model_type="qwen3", num_parameters=9, fingerprint="5fd1")`."""

    model_type: str
    num_parameters: int
    fingerprint: str  # over names and shapes of all parameters
    adapted: Adapted | None = None  # where adapters alone are trained

    def __str__(self) -> str:
        return f"{self.model_type} of {self.num_parameters:,} parameters ({self.fingerprint[:8]})"


class Marker(msgspec.Struct, frozen=True):
    """Contents of a checkpoint, e.g. `Marker(40, 2, architecture, {".metadata": 5120, ...})`."""

    step: int
    world_size: int
    model: Architecture
    files: dict[str, int]  # bytes of each


def complete(partial: Path, folder: Path, *, step: int, world_size: int, model: Architecture) -> None:
    """Make a checkpoint, on disk and under its name, of the files in `partial`; replaces an older `folder`."""
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    write_file(partial / MARKER, msgspec.json.encode(Marker(step, world_size, model, files)))
    sync(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def read_marker(folder: Path) -> Marker:
    """The marker of a complete checkpoint; `ConfigError` names what is missing of any other."""
    path = folder / MARKER
    if not folder.is_dir():
        raise ConfigError(f"checkpoint={folder}: no such folder; name a checkpoint that is there")
    if not path.is_file():
        raise _torn(folder, f"has no {MARKER}")
    try:
        marker = msgspec.json.decode(path.read_bytes(), type=Marker)
    except msgspec.DecodeError as error:
        raise _torn(folder, f"{MARKER} cannot be read, {error}") from None
    for name, size in marker.files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found:,} bytes"
            raise _torn(folder, f"{name} {state} of {size:,}")
    return marker


def _torn(folder: Path, fault: str) -> ConfigError:
    return ConfigError(f"checkpoint={folder}: half written or damaged ({fault}); restore or delete it")
