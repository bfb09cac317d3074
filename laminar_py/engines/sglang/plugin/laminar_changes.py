"""Plugin of SGLang servers: weights from a version's folder, or changed positions, straight into the parameters.

A server that laminar_py launches finds this folder in PYTHONPATH (`launch.py`), and SGLang loads the entry point.
The file imports nothing of laminar_py, since SGLang may have an environment of its own. It hooks
`update_weights_from_disk`, so that only a path travels.

After the first load by SGLang's own loader, the model's `load_weights` runs once more, over tensors without bytes
(`Blank`). Each copy from one of them tells where a part of a file's tensor lies in a parameter: TP slices, fused
and stacked tensors, padding. Every such `Place` is then compared with the loaded parameter. A model that does not
agree, e.g. a quantised one, keeps SGLang's loader and refuses changes (`tests/engines/sglang/test_plugin.py`).

All TP ranks agree before the first value is written, and again after the last.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor

CHANGES = "laminar_changes"  # load format: `model_path` has the paths of files of changes, by lines
TAKES_CHANGES = "[laminar: takes changes]"  # in the answer to a whole load
UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
PIECE_BYTES = 64 * 2**20  # of page-locked memory, two of them
Loader = Callable[..., tuple[bool, str]]  # returns success and a message
log = logging.getLogger(__name__)


class UnfitError(Exception):
    """The reason why weights cannot go straight into the parameters, in one line."""


def register() -> None:
    """Hook the loads of weights. SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(UPDATE, update, HookType.AROUND)


def update(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    model_path: str,
    load_format: str,
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, str]:
    """Load a folder, or files of changes with `load_format=CHANGES`. Returns success and a message."""
    runner = updater.get_model_runner()
    if load_format == CHANGES:
        if runner.is_draft_worker:
            return True, "drafts keep their weights"
        fault = _change(updater, [Path(line) for line in model_path.split("\n")])
        return fault is None, fault or "changed"
    if args or any(kwargs.values()) or load_format != "auto" or runner.is_draft_worker:
        return original(updater, model_path, load_format, *args, **kwargs)
    return _load_whole(original, updater, model_path)


def _load_whole(original: Loader, updater: Any, model_path: str) -> tuple[bool, str]:
    """Load a folder into the known places, or by SGLang's loader, which makes the places known."""
    model, folder = updater.get_model(), Path(model_path)
    known = _known.get(model)
    if isinstance(known, Places):
        fault = _all_ranks(lambda: known.check(model, layout_of(folder))) or _all_ranks(lambda: known.load(folder))
        if fault is None:
            updater.model_config.model_path = model_path
            return True, f"loaded into known places {TAKES_CHANGES}"
        log.warning("laminar: SGLang's loader loads %s: %s", folder, fault)
    success, message = original(updater, model_path, "auto")
    if not success:
        return success, message
    if known is None or isinstance(known, Places):
        found: list[Places] = []
        fault = _all_ranks(lambda: found.append(find_places(updater, model, folder)))
        _known[model] = found[0] if fault is None else fault
        if fault is not None:
            log.warning("laminar: changes are refused: %s", fault)
    return True, f"{message} {TAKES_CHANGES}" if isinstance(_known[model], Places) else message


def _change(updater: Any, files: list[Path]) -> str | None:
    """Put the changes in `files` into the parameters. Returns why not; then nothing is written."""
    model = updater.get_model()
    known = _known.get(model)
    if not isinstance(known, Places):
        return known or "no whole version was loaded before"
    return _all_ranks(lambda: known.check_changes(model, files)) or _all_ranks(lambda: known.change(files))


def _all_ranks(work: Callable[[], object]) -> str | None:
    """Do `work` on each TP rank. Returns why it failed here or elsewhere; None if no rank failed."""
    from sglang.srt.runtime_context import get_parallel

    fault = None
    try:
        with torch.no_grad():
            work()
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank's answer
        fault = " ".join(f"{error or type(error).__name__}".split())
    group = get_parallel().tp_group.cpu_group
    fine = torch.tensor(fault is None, dtype=torch.int32)
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(fine, torch.distributed.ReduceOp.MIN, group=group)
    return fault or (None if fine.item() else "another rank failed; its log says why")


# ---- files

Layout = dict[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype


def layout_of(folder: Path) -> Layout:
    """Read names, shapes and types of the tensors in a folder. Raises `UnfitError` for a name in two files."""
    layout: Layout = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in layout:
                    raise UnfitError(f"{name} is in two files of {folder}")
                piece = file.get_slice(name)
                layout[name] = tuple(piece.get_shape()), piece.get_dtype()
    return layout


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a folder, mapped from its files."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def read_changes(path: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, places [n] and values [n] of each changed tensor in a file."""
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            if key.endswith(".at"):
                name = key.removesuffix(".at")
                yield name, file.get_tensor(key), file.get_tensor(f"{name}.to")


# ---- places


@dataclass(frozen=True, eq=False)
class Place:
    """A part of a file's tensor, and the view of a parameter that holds it, both of one shape."""

    target: Tensor
    strides: tuple[int, ...]  # of the part in the file's tensor
    offset: int

    def part(self, tensor: Tensor) -> Tensor:
        """View this part of the file's tensor."""
        return tensor.as_strided(self.target.shape, self.strides, self.offset)

    def load(self, tensor: Tensor) -> None:
        """Copy this part of the file's tensor into the parameter."""
        if not self.target.is_cuda:
            self.target.copy_(self.part(tensor))
            return
        last = sum((size - 1) * stride for size, stride in zip(self.target.shape, self.strides, strict=True))
        moved = to_device(tensor.flatten()[self.offset : self.offset + last + 1], self.target.device)
        self.target.copy_(moved.as_strided(self.target.shape, self.strides))

    def put(self, at: Tensor, to: Tensor) -> None:
        """Write the values `to [n]` whose flat places `at [n]` in the file's tensor are in this part."""
        rest, index = at - self.offset, torch.zeros_like(at)
        inside = rest >= 0
        steps = zip(self.strides, self.target.shape, self.target.stride(), strict=True)
        for stride, size, step in sorted((one for one in steps if one[1] > 1), reverse=True):
            coordinate = rest // stride
            inside &= coordinate < size
            index += coordinate * step
            rest -= coordinate * stride
        inside &= rest == 0
        last = sum((size - 1) * step for size, step in zip(self.target.shape, self.target.stride(), strict=True))
        flat = self.target.as_strided((last + 1,), (1,))
        flat[index[inside]] = to[inside].to(flat.dtype)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy mapped values [n] to a GPU by page-locked pieces: while one travels, the next is filled."""
    moved = torch.empty_like(values, device=device)
    num = PIECE_BYTES // values.element_size()
    pieces = [values.new_empty(min(num, len(values)), pin_memory=True) for _ in range(2)]
    sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
    for number, start in enumerate(range(0, len(values), num)):
        piece, event = pieces[number % 2], sent[number % 2]
        event.synchronize()
        part = values[start : start + num]
        piece[: len(part)].copy_(part)
        moved[start : start + num].copy_(piece[: len(part)], non_blocking=True)
        event.record()
    torch.cuda.current_stream().synchronize()  # the pieces are free again
    return moved


class Places:
    """Where each tensor of the files is in a model's parameters."""

    def __init__(self, model: torch.nn.Module, layout: Layout, places: dict[str, list[Place]]) -> None:
        self._layout, self._places = layout, places
        self._memory = _memory_of(model)

    def check(self, model: torch.nn.Module, layout: Layout) -> None:
        """Raise `UnfitError` if the files have other tensors, or the parameters have moved."""
        if layout != self._layout:
            raise UnfitError("other tensors than in the first version")
        if _memory_of(model) != self._memory:
            raise UnfitError("the parameters have moved")

    def compare(self, folder: Path) -> None:
        """Raise `UnfitError` unless the parameters hold the values of the files at these places."""
        for name, tensor in read_tensors(folder):
            for place in self._places[name]:
                expected = place.part(tensor).to(place.target.device, place.target.dtype)
                if not torch.equal(place.target, expected):
                    raise UnfitError(f"{name} is served in another form")

    def load(self, folder: Path) -> None:
        """Copy all tensors in a folder into the parameters."""
        for name, tensor in read_tensors(folder):
            for place in self._places[name]:
                place.load(tensor)
        _synchronize()

    def check_changes(self, model: torch.nn.Module, files: list[Path]) -> None:
        """Raise `UnfitError` for an unknown tensor, places that do not ascend within it, or values not finite."""
        self.check(model, self._layout)
        for path in files:
            for name, at, to in read_changes(path):
                if name not in self._layout:
                    raise UnfitError(f"{name} is no tensor of the model")
                count = math.prod(self._layout[name][0])
                if len(at) and (at[0] < 0 or at[-1] >= count or not (at[1:] > at[:-1]).all()):
                    raise UnfitError(f"{name} has places that do not ascend within its {count} values")
                if not to.isfinite().all():
                    raise UnfitError(f"{name} has values that are not finite")

    def change(self, files: list[Path]) -> None:
        """Write the changes in files that `check_changes` accepts."""
        for path in files:
            for name, at, to in read_changes(path):
                for place in self._places[name]:
                    device = place.target.device
                    place.put(at.to(device), to.to(device))
        _synchronize()


_known: "WeakKeyDictionary[torch.nn.Module, Places | str]" = WeakKeyDictionary()  # or why there are none


def _memory_of(model: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # requests run on another stream


class Blank(torch.Tensor):
    """A tensor of a file without bytes. Its views know their place in it, and copies from them are recorded."""

    places: list[Place]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do what a loader does with a tensor. Raises `UnfitError` for what makes another tensor of it."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.copy_:
                return _record(*args[:2])
            source = args[0]
            if not isinstance(source, Blank):
                raise UnfitError(f"the model's loader calls {func}")
            if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
                kinds = [one for one in (*args[1:], *(kwargs or {}).values()) if isinstance(one, torch.dtype)]
                if kinds not in ([], [source.dtype]):
                    raise UnfitError(f"the model's loader casts to {kinds[0]}")
                return source  # another device
            return _viewed(func(*args, **kwargs or {}), source, func)


def _viewed(found: Any, source: Blank, func: object) -> Any:
    """Make views of `source` blanks of the same tensor; leave other answers as they are."""
    if isinstance(found, tuple | list) and not isinstance(found, torch.Size):
        return type(found)(_viewed(one, source, func) for one in found)
    if not isinstance(found, Tensor):
        return found
    if found.untyped_storage()._cdata != source.untyped_storage()._cdata or found.dtype != source.dtype:
        raise UnfitError(f"the model's loader calls {func}")
    view = found.as_subclass(Blank)
    view.places = source.places
    return view


def _record(target: Tensor, source: Blank) -> Tensor:
    """Note the copy of a part of a file's tensor into a parameter, in place of doing it."""
    if isinstance(target, Blank) or target.shape != source.shape:
        raise UnfitError(f"the model's loader copies {tuple(source.shape)} into {tuple(target.shape)}")
    if target.numel():
        source.places.append(Place(target.detach(), source.stride(), int(source.storage_offset())))
    return target


def find_places(updater: Any, model: torch.nn.Module, folder: Path) -> Places:
    """Find where the tensors of a loaded folder are. Raises `UnfitError` for a model that holds other values."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    updater._assert_weight_cache_inactive("laminar's plugin")
    if (fault := weight_updater._unsupported_derived_weight_cache_error(model)) is not None:
        raise UnfitError(fault)
    if hasattr(model, "post_load_weights"):
        raise UnfitError(f"{type(model).__name__} computes further tensors from its weights")
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    if other := sorted(methods - {*PLAIN, "NoneType"}):
        raise UnfitError(f"layers of {other[0]} hold other values than the files")
    layout = layout_of(folder)
    blanks = {
        name: torch.empty(shape, dtype=_TYPES[kind], device="meta") for name, (shape, kind) in layout.items()
    }
    found: dict[str, list[Place]] = {name: [] for name in layout}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in blanks.items():
            blank = tensor.as_subclass(Blank)
            blank.places = found[name]
            yield name, blank

    model.load_weights(weights())  # type: ignore[operator]
    places = Places(model, layout, found)
    places.compare(folder)
    return places


_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
