"""The marker of a complete checkpoint: `complete.json`, which is written last.

The learner writes it; the learner and the controller, which has no torch, read it. A folder that `read_marker`
accepts has every file of the checkpoint in full length (`tests/learner/test_checkpoint.py`).
"""

import shutil
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.records.host import sync, write_file

MARKER = "complete.json"


class AdapterFingerprint(msgspec.Struct, frozen=True):
    """Base and settings of adapters. A checkpoint loads only into adapters with an equal fingerprint.

    E.g. `AdapterFingerprint("9f2c...", 16, 32.0, ("q_proj", "v_proj"))`.
    """

    base: str  # digest of the base weights, by `records.weights.base_digest`
    rank: int
    alpha: float
    targets: tuple[str, ...]  # sorted

    def __str__(self) -> str:
        targets = ",".join(self.targets)
        return f"adapters of rank {self.rank} and alpha {self.alpha:g} on {targets}, base {self.base[:8]}"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a model. A checkpoint loads only into a model with an equal `Architecture`.

    E.g. `Architecture(model_type="qwen3", num_parameters=9, fingerprint="5fd1")`.
    """

    model_type: str
    num_parameters: int
    fingerprint: str  # digest over names and shapes of all parameters
    adapted: AdapterFingerprint | None = None  # set if only adapters are trained

    def __str__(self) -> str:
        trained = "" if self.adapted is None else f" with {self.adapted}"
        return f"{self.model_type} of {self.num_parameters:,} parameters ({self.fingerprint[:8]}){trained}"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Text of `complete.json` in a checkpoint.

    E.g. `Marker(step=40, world_size=2, model=architecture, files={".metadata": 5120, ...}, updates=160)`.
    """

    step: int
    world_size: int
    model: Architecture
    files: dict[str, int]  # name -> bytes
    updates: int | None = None  # of the optimizer since the start; None if an older version wrote the marker
    has_critic: bool = False  # beside the policy


def complete_checkpoint(
    partial: Path,
    folder: Path,
    *,
    step: int,
    world_size: int,
    model: Architecture,
    updates: int | None = None,
    has_critic: bool = False,
) -> None:
    """Write the marker into the folder `partial`, sync it, and rename it to `folder`, which it replaces."""
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    marker = Marker(
        step=step, world_size=world_size, model=model, files=files, updates=updates, has_critic=has_critic
    )
    write_file(partial / MARKER, msgspec.json.encode(marker))
    sync(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def read_marker(folder: Path) -> Marker:
    """Read the marker of a checkpoint. Raises `ConfigError`, naming the fault, if the checkpoint is incomplete."""
    path = folder / MARKER
    if not folder.is_dir():
        raise ConfigError(f"checkpoint={folder}: no such folder; name an existing checkpoint")
    if not path.is_file():
        raise _torn(folder, f"has no {MARKER}")
    try:
        marker = msgspec.json.decode(path.read_bytes(), type=Marker)
    except msgspec.DecodeError as error:
        raise _torn(folder, f"{MARKER} cannot be read, {error}") from None
    for name, size in marker.files.items():
        file = folder / name
        size_here = file.stat().st_size if file.is_file() else None
        if size_here != size:
            state = "is missing" if size_here is None else f"has {size_here:,} bytes"
            raise _torn(folder, f"{name} {state} of {size:,}")
    return marker


def _torn(folder: Path, fault: str) -> ConfigError:
    return ConfigError(f"checkpoint={folder}: half written or damaged ({fault}); restore or delete it")
