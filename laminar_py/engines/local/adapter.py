"""Adapters merged into the weights of the embedded engine. Called by `LocalModel`.

Each merge starts from the base weights, which stay in fp32, and rounds once. The weights of a version therefore do
not depend on the versions served before (`tests/engines/local/test_adapter.py`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from laminar_py.engines.local.spec import ModelSpec
from laminar_py.engines.local.weights import Projection, Weights, load_weights, projections
from laminar_py.records.engine import RefusedError
from laminar_py.records.weights import ADAPTER_WEIGHTS, PREFIX, AdapterConfig, check_base, read_adapter_config


@dataclass(frozen=True, slots=True)
class _Pair:
    """Change of one matrix of one layer by rank r: the adapter's scaling times B A."""

    layer: int
    place: Projection
    down: Tensor  # [r, in] A
    up: Tensor  # [out, r] B


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapters of one version, e.g. `Adapter.read(Path("/dev/shm/run/node-1/v7"), spec=spec)`."""

    config: AdapterConfig
    pairs: tuple[_Pair, ...]

    @classmethod
    def read(cls, folder: Path, *, spec: ModelSpec) -> Self:
        """Read the adapters in `folder`. `RefusedError` names a missing, unknown or misshapen tensor."""
        config, places = read_adapter_config(folder), projections(spec)
        unknown = ",".join(sorted(set(config.target_modules) - set(places)))
        if unknown:
            raise RefusedError(f"weights={folder}: adapters of {unknown}; adapt only {', '.join(places)}")
        tensors = _read_tensors(folder)
        pairs = []
        for layer in range(spec.num_layers):
            for target in sorted(config.target_modules):
                place = places[target]
                name = f"{PREFIX}model.layers.{layer}.{place.block}.{target}.lora_"
                down = _pop_tensor(tensors, f"{name}A.weight", (config.r, place.inputs), folder)
                up = _pop_tensor(tensors, f"{name}B.weight", (place.size, config.r), folder)
                pairs.append(_Pair(layer, place, down, up))
        if tensors:
            raise RefusedError(
                f"weights={folder}: {min(tensors)} belongs to another model; publish adapters of model.path"
            )
        return cls(config, tuple(pairs))


class AdapterBase:
    """The base weights in fp32 that adapters change, e.g. `AdapterBase(adapter.config, spec=spec)`.

    Raises `RefusedError` if the folder holds weights of another model, or not the base that the learner trains on.
    """

    def __init__(self, config: AdapterConfig, *, spec: ModelSpec) -> None:
        self._folder, self._spec = Path(config.base_model_name_or_path), spec
        self._config = config
        check_base(self._folder, config)
        exact = load_weights(self._folder, spec=replace(spec, dtype=torch.float32))
        fields = {place.field for name, place in projections(spec).items() if name in config.target_modules}
        self._exact = [{field: getattr(layer, field) for field in fields} for layer in exact.layers]

    def fits(self, config: AdapterConfig) -> bool:
        """True if adapters with `config` have this base, and change the matrices that this object holds."""
        own = self._config
        return (own.revision, set(own.target_modules)) == (config.revision, set(config.target_modules))

    def weights(self) -> Weights:
        """A new copy of the base weights in the dtype of the model, for `merge` to change."""
        return load_weights(self._folder, spec=self._spec)

    def merge(self, adapter: Adapter, weights: Weights) -> None:
        """Overwrite the adapted matrices of `weights` with base plus `adapter`.

        `weights` come from `weights()`; an earlier merge into them leaves no trace.
        """
        for pair in adapter.pairs:
            columns = slice(pair.place.start, pair.place.start + pair.place.size)
            base = self._exact[pair.layer][pair.place.field][:, columns]
            up = pair.place.packed(pair.up)
            merged = torch.addmm(base, pair.down.t(), up.t(), alpha=adapter.config.scaling)
            getattr(weights.layers[pair.layer], pair.place.field)[:, columns].copy_(merged)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all adapter tensors in `folder` by name, as fp32. `RefusedError` for an unreadable file."""
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            return {name: file.get_tensor(name).to(torch.float32, copy=True) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RefusedError(f"weights={folder}: {ADAPTER_WEIGHTS}: {error}; write the version again") from error


def _pop_tensor(tensors: dict[str, Tensor], name: str, shape: tuple[int, int], folder: Path) -> Tensor:
    """Remove and return the tensor `name`. `RefusedError` if it is missing or has another shape."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise RefusedError(f"weights={folder}: {name} is missing; write all tensors of the adapters")
    if tensor.shape != shape:
        raise RefusedError(
            f"weights={folder}: {name} has shape {tuple(tensor.shape)}, but its layer needs {shape};"
            " publish adapters of model.path"
        )
    return tensor
