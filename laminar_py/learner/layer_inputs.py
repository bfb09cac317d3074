"""Inputs of layers in host memory between forward and backward pass: `learner.recompute=all_offloaded`.

A layer that computes its activations again keeps its input alone, by torch's `checkpoint`. Hooks on saved tensors
move this input to pinned host memory. On a GPU a stream of its own copies it while the layer computes, and in the
backward pass brings it back while the layer after it computes. `torch.autograd.graph.save_on_cpu` copies on the
computing stream, which waits. On a CPU the copies change nothing (`tests/learner/test_layer_inputs.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel


@dataclass(slots=True, eq=False)
class SavedInput:
    """The input of one layer in one forward pass."""

    host: Tensor  # [1, T, H], pinned
    on_device: Tensor | None  # [1, T, H] until its copy is complete, and again from shortly before its use on
    before: "SavedInput | None"  # of the layer before; None: the first layer


class InputOffloader:
    """Saves the inputs of a model's layers on the host. At most two are on the device at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = device.type == "cuda"
        self._module = torch.get_device_module(device)  # streams of a CPU exist and do nothing
        self._copies = self._module.Stream()
        self._newest: SavedInput | None = None

    def wrap(self, forward: Callable[..., Tensor], *, is_first: bool) -> Callable[..., Tensor]:
        """Return a layer's `forward` that saves its first argument on the host; `is_first` starts a pass."""

        def offloading(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            place, shape = hidden.data_ptr(), hidden.shape  # autograd keeps `pack`, which must not keep `hidden`

            def pack(tensor: Tensor) -> Tensor | SavedInput:
                is_input = tensor.data_ptr() == place and tensor.shape == shape
                return self._save(tensor, is_first=is_first) if is_input else tensor

            with saved_tensors_hooks(pack, self._restore):
                return forward(hidden, *args, **kwargs)

        # The compiler compiles `forward` alone, so the hooks see what the compiled forward saves.
        outside: Callable[..., Tensor] = torch.compiler.disable(offloading, recursive=False)  # type: ignore[no-untyped-call]
        return outside

    def _save(self, hidden: Tensor, *, is_first: bool) -> SavedInput:
        """Start the copy of a layer's input, and free the input before, whose copy is complete by then."""
        self._await_copies()
        before = None if is_first else self._newest
        if before is not None:
            before.on_device = None
        host = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=self._pins)
        leaving = hidden.detach()
        self._newest = SavedInput(host, leaving, before)
        self._copy(leaving, host)
        return self._newest

    def _restore(self, saved: Tensor | SavedInput) -> Tensor:
        """Return a saved tensor on its device, and start to bring back the layer before's input."""
        if isinstance(saved, Tensor):
            return saved
        self._await_copies()
        hidden = self._fetch(saved) if saved.on_device is None else saved.on_device
        saved.on_device = self._newest = None
        if saved.before is not None:
            saved.before.on_device = self._fetch(saved.before)
        return hidden

    def _fetch(self, saved: SavedInput) -> Tensor:
        """Start the copy of an input to the device."""
        hidden = torch.empty(saved.host.shape, dtype=saved.host.dtype, device=self._device)
        self._copy(saved.host, hidden)
        return hidden

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Copy once all work so far is done: then `source` is written, and the memory of `target` is free."""
        self._copies.wait_stream(self._module.current_stream())
        with self._module.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def _await_copies(self) -> None:
        """Let later work on the device wait for the copies so far."""
        self._module.current_stream().wait_stream(self._copies)


def offload_inputs(model: PreTrainedModel) -> None:
    """Let the layers of a model, which compute their activations again, keep their inputs on the host."""
    offloader = InputOffloader(model.compute_device)
    for place, layer in enumerate(model.base_model.layers):
        layer.forward = offloader.wrap(layer.forward, is_first=place == 0)
