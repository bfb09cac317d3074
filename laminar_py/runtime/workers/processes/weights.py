"""The process that publishes a model folder as it is, in place of a learner."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from laminar_py.records.codec import decode, encode
from laminar_py.records.weights import Published
from laminar_py.runtime.workers.processes.setup import PartActor, open_part
from laminar_py.runtime.workers.specs import WeightsSpec

if TYPE_CHECKING:
    import torch

    from laminar_py.relay.publisher import Publisher

VERSION = 0  # of whatever is evaluated, also where an evaluation goes on


class WeightsActor(PartActor):
    """Shell of a publisher."""

    def __init__(self) -> None:
        super().__init__()
        self._publisher: Publisher | None = None  # holds the version's pages

    def publish(self, data: bytes) -> bytes:
        """`Published`, once the version is complete; a version that an earlier process left is taken as it is."""
        from laminar_py.engines.model_sizes import served_dtype
        from laminar_py.relay.messages import Manifest
        from laminar_py.relay.pages import allow_many_files
        from laminar_py.relay.publisher import Publisher
        from laminar_py.relay.store import MANIFEST, complete_versions, folder_name

        spec = decode(WeightsSpec, data)
        model = open_part(spec, "weights").model.path
        store = Path(spec.store)
        if store.is_dir() and VERSION in complete_versions(store):
            manifest = msgspec.json.decode((store / folder_name(VERSION) / MANIFEST).read_bytes(), type=Manifest)
            return encode(Published(VERSION, manifest.digest, manifest.num_bytes, 0.0))
        allow_many_files()
        self._publisher = Publisher(store, chunk_bytes=spec.chunk_bytes)
        self._publisher.publish(VERSION, folder_tensors(model, served_dtype(model)))
        return encode(self._publisher.completed(VERSION))


def folder_tensors(model: Path, dtype: str) -> "Iterator[tuple[str, torch.Tensor]]":
    """Every tensor of a model folder, one at a time and always in the same order; floats in `dtype`."""
    import torch
    from safetensors import safe_open

    wanted = getattr(torch, dtype)
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                yield name, tensor.to(wanted).contiguous() if tensor.is_floating_point() else tensor
