"""Plugin of SGLang servers: weights from a version's folder, or changed positions, straight into the parameters.

A server that laminar_py launches finds this folder in PYTHONPATH (`launch.py`), and SGLang loads the entry point.
The file imports nothing of laminar_py, since SGLang may have an environment of its own. It hooks
`update_weights_from_disk`, so that only a path travels.

After the first load by SGLang's own loader, the model's `load_weights` runs once more, over tensors without bytes
(`Blank`). Each copy from one of them tells where a part of a file's tensor lies in a parameter: TP slices, fused
and stacked tensors, padding. Every such `Place` is then compared with the loaded parameter. A model that does not
agree, e.g. a quantised one, keeps SGLang's loader and refuses changes (`tests/engines/sglang/test_plugin.py`).

All TP ranks agree before the first value is written, and again after the last. The client has checked places and
values of changes before it calls the server (`engines/changes.py`).
"""

import json
import logging
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor

CHANGES = "laminar_changes"  # load format: `model_path` has a path in each line
TAKES_CHANGES = "[laminar: takes changes]"  # in the answer to a whole load
HALF_CHANGED = "[laminar: half changed]"  # in an answer that ends the server's use
UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"
CHECK = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
ADAPTERS = "laminar.adapters/"
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
    HookRegistry.register(CHECK, add_adapters, HookType.AFTER)
    HookRegistry.register(PAUSED, sleep_while_paused, HookType.AFTER)


def sleep_while_paused(_: None, scheduler: Any) -> None:
    """Have a paused scheduler wait for its next request, if it sleeps when idle; else it keeps a core busy."""
    scheduler.maybe_sleep_on_idle()


def add_adapters(found: dict[str, Any] | None, runner: Any, *_: object, **__: object) -> dict[str, Any] | None:
    """Add hashes of the loaded adapters to a server's checksum, which covers the base alone.

    A tensor's name there is `laminar.adapters/`, the adapter's name, `/` and its name in the adapter.
    """
    manager = getattr(runner, "lora_manager", None)
    if found is None or "checksums" not in found or manager is None:
        return found
    hashes = {ADAPTERS: ""}  # tells the client that the plugin is there
    for key, adapter in manager.loras.items():
        for layer in adapter.layers:
            for name, tensor in layer.weights.items():
                data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
                place = f"{ADAPTERS}{manager.lora_refs[key].lora_name}/{name}"
                hashes[place] = blake2b(data, digest_size=16).hexdigest()
    return {**found, "checksums": {**found["checksums"], **hashes}}


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
    known, half = _known.get(model), ""
    if isinstance(known, Places):
        fault = _all_ranks(lambda: known.check(model, layout_of(folder)))
        if fault is None:
            fault, half = _all_ranks(lambda: known.load(folder)), HALF_CHANGED
        if fault is None:
            updater.model_config.model_path = model_path
            return True, f"loaded into known places {TAKES_CHANGES}"
        log.warning("laminar: SGLang's loader loads %s: %s", folder, fault)
    success, message = original(updater, model_path, "auto")
    if not success:
        return success, f"{half}{message}"
    if known is None or isinstance(known, Places):
        found: list[Places] = []
        fault = _all_ranks(lambda: found.append(find_places(updater, model, folder)))
        _known[model] = found[0] if fault is None else fault
        if fault is not None:
            log.warning("laminar: changes are refused: %s", fault)
    return True, f"{message} {TAKES_CHANGES}" if isinstance(_known[model], Places) else message


def _change(updater: Any, files: list[Path]) -> str | None:
    """Put the changes in `files` into the parameters.

    Returns why not. Nothing is written then, unless the reason begins with `HALF_CHANGED`.
    """
    model = updater.get_model()
    known = _known.get(model)
    if not isinstance(known, Places):
        return known or "no whole version was loaded before"
    changes: Changes = []

    def read() -> None:
        known.check_memory(model)
        for path in files:
            changes.extend(read_changes(path))

    if (fault := _all_ranks(read)) is not None:
        return fault
    fault = _all_ranks(lambda: known.change(changes))
    return fault and f"{HALF_CHANGED} {fault}"


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

_TYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
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


Changes = list[tuple[str, Tensor, Tensor]]  # name, places [n], values [n] of each changed tensor


def read_changes(path: Path) -> Changes:
    """Map a file of changes; `safe_open` would take longer than the changes. The client has checked it."""
    # Shared: with strict overcommit a private mapping costs the size of this sparse file, that is the model's.
    mapped = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    start = 8 + int.from_bytes(bytes(mapped[:8].tolist()), "little")
    entries = json.loads(path.open("rb").read(start)[8:])

    def cut(entry: dict[str, Any]) -> Tensor:
        begin, end = (start + offset for offset in entry["data_offsets"])
        kind = _TYPES[entry["dtype"]]
        return (mapped[begin:end].clone() if begin % kind.itemsize else mapped[begin:end]).view(kind)

    names = [key.removesuffix(".at") for key in entries if key.endswith(".at")]
    return [(name, cut(entries[f"{name}.at"]), cut(entries[f"{name}.to"])) for name in names]


# ---- places


class Place:
    """A part of a file's tensor, and the view `target` of a parameter that holds it, both of one shape.

    The part has `strides` in the file's tensor, and begins at `offset` there.
    """

    def __init__(self, target: Tensor, strides: tuple[int, ...], offset: int) -> None:
        self.target = target
        self._strides, self._offset = strides, offset
        sizes, steps = target.shape, target.stride()
        self._end = offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        self._memory = target.as_strided((last + 1,), (1,))
        self._is_run = target.is_contiguous() and self._end - offset == target.numel()  # in both places
        # stride, size and step of each dimension, the largest stride first
        self._dims = sorted((one for one in zip(strides, sizes, steps, strict=True) if one[1] > 1), reverse=True)

    def part(self, tensor: Tensor) -> Tensor:
        """View this part of the file's tensor."""
        return tensor.as_strided(self.target.shape, self._strides, self._offset)

    def load(self, tensor: Tensor) -> None:
        """Copy this part of the file's tensor into the parameter."""
        if self.target.is_cuda:
            moved = to_device(tensor.flatten()[self._offset : self._end], self.target.device)
            self.target.copy_(moved.as_strided(self.target.shape, self._strides))
        else:
            self.target.copy_(self.part(tensor))

    def put(self, at: Tensor, to: Tensor) -> None:
        """Write the values `to [n]` whose ascending flat places `at [n]` in the file's tensor are in this part."""
        if len(at) and not self._offset <= at[0] <= at[-1] < self._end:
            ends = torch.tensor([self._offset, self._end], device=at.device)
            first, last = torch.searchsorted(at, ends).tolist()
            at, to = at[first:last], to[first:last]
        index, to = at - self._offset if self._offset else at, to.to(self._memory.dtype)
        if not self._is_run:
            rest, inside, index = index, torch.ones_like(index, dtype=torch.bool), torch.zeros_like(index)
            for stride, size, step in self._dims:
                coordinate = rest // stride
                inside &= coordinate < size
                index += coordinate * step
                rest = rest - coordinate * stride
            inside &= rest == 0
            index, to = index[inside], to[inside]
        self._memory.put_(index, to)


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
        self.check_memory(model)

    def check_memory(self, model: torch.nn.Module) -> None:
        """Raise `UnfitError` if the parameters have moved."""
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

    def change(self, changes: Changes) -> None:
        """Write changes in turn. The client has checked them against the version that it loaded before."""
        for name, at, to in changes:
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
    """Note which part of a tensor is copied where, in place of the copy."""
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
    check_model(model)
    places = record(model, layout_of(folder))
    places.compare(folder)
    return places


def check_model(model: torch.nn.Module) -> None:
    """Raise `UnfitError` for a model that serves other values than the files have."""
    if hasattr(model, "post_load_weights"):
        raise UnfitError(f"{type(model).__name__} computes further tensors from its weights")
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    if other := sorted(methods - {*PLAIN, "NoneType"}):
        raise UnfitError(f"layers of {other[0]} hold other values than the files")


def record(model: torch.nn.Module, layout: Layout) -> Places:
    """Run the model's loader over tensors without bytes, and return where it puts them."""
    found: dict[str, list[Place]] = {name: [] for name in layout}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, (shape, kind) in layout.items():
            blank = torch.empty(shape, dtype=_TYPES[kind], device="meta").as_subclass(Blank)
            blank.places = found[name]
            yield name, blank

    model.load_weights(weights())  # type: ignore[operator]
    return Places(model, layout, found)
