"""Files of changes between two versions' folders, for tests and benchmarks of engines."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from laminar_py.records.engine import InferenceEngine
from laminar_py.records.weights import AT, TO


def read_version(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def write_changes(before: Path, after: Path, file: Path, *, base: int, version: int) -> Path:
    """The values of `after` that differ from `before`, in the format of `records.weights`."""
    old = read_version(before)
    found = {}
    for name, tensor in read_version(after).items():
        bits = {2: torch.int16, 4: torch.int32}[tensor.itemsize]  # 0.0 and -0.0 are equal, but not their bytes
        at = (tensor.flatten().view(bits) != old[name].flatten().view(bits)).nonzero()[:, 0]
        if len(at):
            found |= {name + AT: at, name + TO: tensor.flatten()[at]}
    return save_changes(found, file, base=base, version=version)


def save_changes(tensors: dict[str, torch.Tensor], file: Path, *, base: object, version: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"base": str(base), "version": str(version)})
    return file


async def load_changes(engine: InferenceEngine, files: Sequence[Path], version: int) -> None:
    """Check files of changes, and load them."""
    await engine.load_changes(await engine.check_changes(files, version))


def nudged(folder: Path, into: Path, *, share: float = 0.01, seed: int = 0) -> Path:
    """A version with other values in a share of the places of each tensor, and its config."""
    generator = torch.Generator().manual_seed(seed)
    into.mkdir(parents=True)
    tensors = read_version(folder)
    for tensor in tensors.values():
        at = torch.randperm(tensor.numel(), generator=generator)[: max(1, round(tensor.numel() * share))]
        tensor.view(-1)[at] *= -1.25
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    for path in folder.glob("*.json"):
        (into / path.name).write_bytes(path.read_bytes())
    return into


def kind_of_mapping(path: Path) -> set[str]:
    """How this process has mapped a file: `s` for shared, `p` for private."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[1][3] for line in lines if line.endswith(str(path))}
