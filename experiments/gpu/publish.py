"""A weight version at 1.5B parameters: the learner's stall, bytes that travel, time until another process has it.

`python -m experiments.gpu.publish [--dry]` in the project's folder, as `run` calls it. A learner trains in fp32
masters, on new random tokens in each step, and publishes bf16 to a root and its child in processes of their own on
this host, with CURVE. With `--dry` it is a tiny model.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from experiments.gpu.learner import TINY
from experiments.gpu.steps import FULL, GpuStep, open_learner
from laminar_lab.bench.relay_pair import CHUNK_BYTES, RelayPair
from laminar_lab.bench.report import Ratio, Row, Side, in_turn, log_line, show
from laminar_lab.bench.workplace import SHARED_MEMORY, count_parameters, workplace
from laminar_lab.calibration.learner import make_trajectory
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.step import Learner
from laminar_py.records.trajectory import MicroBatch
from laminar_py.records.weights import TensorSource
from laminar_py.relay import apply, encode, generate_keys
from laminar_py.relay.messages import VersionComplete

SEQUENCES = 8  # of a step
RATE_NAME, RATE = "1e6", 1e-6  # of learning; the name is part of the rows' names
BETAS, WEIGHT_DECAY = (0.9, 0.999), 0.01
FIRST_STEP, LAST_STEP = 12, 15  # whose deltas count, each against the step before
REPEATS, FULL_REFRESHES = 3, 3
WARM_TURNS = 2  # of two publishes each: `WARM_VERSIONS`
HELD_VERSIONS = 12  # in both stores together, at the most
REFRESH = "from the beginning of the publish until a node in another process has verified the version"

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]  # weights in bf16, as integers


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version at the child, e.g. `Arrival(2.1, report)`."""

    seconds: float  # from the beginning of its publish until it was verified
    report: VersionComplete

    @property
    def share(self) -> float:
        """Bytes that travelled over those of the version."""
        return self.report.wire_bytes / self.report.num_bytes


class Bench:
    """A learner, and the relays that it publishes to, e.g. `Bench(learner, pair, size)`."""

    def __init__(self, learner: Learner, pair: RelayPair, size: GpuStep) -> None:
        self.learner = learner
        self._pair = pair
        self.size = size

    def train(self, step: int) -> None:
        """A step on tokens that are new; each weighs as one that the policy itself has just drawn."""
        size = self.size
        first, vocab = step * size.sequences, size.model.vocab_size
        items = [make_trajectory(first + n, length, vocab=vocab) for n, length in enumerate(size.lengths(step))]
        found = self.learner.step([self._drawn(batch) for batch in size.pack(items)])
        assert found.skipped == 0, f"step {step} changed nothing"

    def _drawn(self, batch: MicroBatch) -> MicroBatch:
        with torch.no_grad():
            logprobs, _ = policy_logprobs(self.learner.model, batch)
        return msgspec.structs.replace(batch, behaviour_logprobs=logprobs.float().cpu().numpy())

    def sources(self) -> list[TensorSource]:
        """Weights as they are published: cast by the copy."""
        return self.learner.sources(dtype=torch.bfloat16, gather=False)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Weights cast before."""
        return self.learner.named_tensors(dtype=torch.bfloat16)

    def words(self) -> Words:
        """[num_parameters] of what is published."""
        flat = torch.cat([tensor.flatten().cpu() for _, tensor in self.tensors()])
        words: Words = flat.view(torch.uint16).numpy()
        return words

    def stall(self, sources: Sequence[TensorSource]) -> float:
        """Seconds for which the learner stands still for a version, once pages for it are warm."""
        self._pair.await_spare()
        stall_s = self._pair.publish_sources(sources)
        self._pair.await_last()
        return stall_s

    def refresh(self) -> Arrival:
        """Publish the weights and wait for them at the child."""
        self._pair.await_spare()
        began = time.monotonic()
        self._pair.publish_sources(self.sources())
        _, report = self._pair.await_last()
        return Arrival(time.monotonic() - began, report)


def groups(size: GpuStep, *, device_type: str, shm: Path, repeats: int) -> Iterator[list[Row]]:
    """Figures as they are found: stall, deltas, full versions, and the codec of deltas."""
    setting = _setting(size, device_type, shm)
    settings = LearnerConfig(lr=RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, recompute=Recompute.SELECTIVE)
    size = replace(size, settings=settings)
    with (
        workplace(shm) as folder,
        open_learner(folder, size, device_type=device_type) as learner,
        RelayPair(folder / "relays", keys=generate_keys()) as pair,
    ):
        bench = Bench(learner, pair, size)
        yield stall_rows(bench, device_type=device_type, setting=setting, repeats=repeats)
        found, base, new = delta_rows(bench, RATE_NAME, setting=setting)
        yield found
        yield [full_row(bench, setting=setting)]
        yield codec_rows(base, new, repeats=max(1, repeats // 2), rate=RATE)


def _setting(size: GpuStep, device_type: str, shm: Path) -> str:
    where = "a CPU" if device_type == "cpu" else torch.cuda.get_device_name()
    memory = "shared memory" if shm == SHARED_MEMORY else "a disk, since shared memory has no room"
    return f"{count_parameters(size.model) / 1e9:.2g}G parameters on {where}, bf16 of fp32 masters, in {memory}"


def delta_rows(bench: Bench, name: str, *, setting: str) -> tuple[list[Row], Words, Words]:
    """Bytes and time of the versions of the last few steps, each against the one before; and the last two."""
    rate = bench.size.settings.lr
    arrivals: list[Arrival] = []
    base = words = bench.words()
    for step in range(1, LAST_STEP + 1):
        bench.train(step)
        if step >= LAST_STEP - 1:
            base, words = words, bench.words()
        if step >= FIRST_STEP - 1:
            arrivals.append(bench.refresh())
            log_line(f"step {step} at {rate:g}: {arrivals[-1].share:.4f} in {arrivals[-1].seconds:.2f} s")
    deltas = arrivals[1:]
    worst = max(delta.share for delta in deltas)
    conditions = (
        f"{setting}; AdamW at {rate:g} with betas {BETAS}, policy-gradient loss on new random tokens; steps"
        f" {FIRST_STEP} to {LAST_STEP} ({', '.join(f'{delta.share:.4f}' for delta in deltas)}), in the last"
        f" {np.mean(base != words):.2%} of elements changed"
    )
    seconds, num_bytes = median(delta.seconds for delta in deltas), deltas[-1].report.num_bytes
    rows = [
        Row(f"delta_bytes_{name}", worst, "of full bytes", f"worst of {conditions}"),
        Row(f"delta_MB_{name}", worst * num_bytes / 1e6, "MB", f"worst of {conditions}"),
        Row(f"refresh_delta_{name}_s", seconds, "s", f"{REFRESH}, median; {conditions}"),
    ]
    return rows, base, words


def stall_rows(bench: Bench, *, device_type: str, setting: str, repeats: int) -> list[Row]:
    """Stall of a publish from fp32 masters, and of tensors that are bf16, over plain copies of the same bytes."""
    ready = [(name, tensor.detach().clone()) for name, tensor in bench.tensors()]
    pairs = [(raw(tensor.cpu()), np.ones_like(raw(tensor.cpu()))) for _, tensor in ready]
    sides = {
        "cast": lambda _: bench.stall(bench.sources()),
        "ready": lambda _: bench.stall([TensorSource.whole(name, tensor) for name, tensor in ready]),
        "copy": lambda _: copy_s(pairs),
    }
    if device_type == "cuda":
        sides["device_copy"] = _device_copy([tensor for _, tensor in ready])
    found = in_turn(sides, rounds=repeats, warm=WARM_TURNS)
    num_bytes = sum(tensor.nbytes for _, tensor in ready)
    conditions = (
        f"{setting}; {num_bytes / 1e9:.2f} GB in {len(ready)} tensors; numpy.copyto of them into warm memory"
        f" {1000 * median(found['copy']):.0f} ms; median of {repeats} in turn"
    )
    cast, plain = (Ratio.between(found[side], found["copy"]) for side in ("cast", "ready"))
    rows = [
        Row("publish_stall_ms", 1000 * median(found["cast"]), "ms", f"cast included; {conditions}"),
        Row("publish_stall_without_cast_ms", 1000 * median(found["ready"]), "ms", conditions),
        Row("stall_with_cast_over_memcpy", cast.median, "x", f"{conditions}; {cast}"),
        Row("stall_over_memcpy", plain.median, "x", f"{conditions}; {plain}"),
    ]
    if "device_copy" in found:
        speed = num_bytes / 1e9 / median(found["device_copy"])
        ours = Ratio.between(found["cast"], found["device_copy"])
        rows += [
            Row("device_copy_GBps", speed, "GB/s", f"GPU to page-locked memory; {conditions}"),
            Row("stall_with_cast_over_device_copy", ours.median, "x", f"{conditions}; {ours}"),
        ]
    return rows


def _device_copy(tensors: Sequence[Tensor]) -> Side:
    """Seconds of a plain copy from a GPU to page-locked memory."""
    landing = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]

    def copy(_: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for target, tensor in zip(landing, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return copy


def full_row(bench: Bench, *, setting: str) -> Row:
    """Time of versions in which every weight has changed, so that no delta is worth its while."""
    arrivals = []
    for _ in range(FULL_REFRESHES):
        with torch.no_grad():
            for parameter in bench.learner.model.parameters():
                parameter.mul_(1.02)
        arrivals.append(bench.refresh())
    seconds = median(arrival.seconds for arrival in arrivals)
    shares = ", ".join(f"{arrival.share:.3f}" for arrival in arrivals)
    conditions = f"{REFRESH}; every weight 2 % larger, {shares} of the bytes over the wire; {setting}"
    return Row("refresh_full_s", seconds, "s", conditions)


def codec_rows(base: Words, new: Words, *, repeats: int, rate: float) -> list[Row]:
    """Measure the codec in bytes of the full version per CPU second of one thread."""
    olds, news = _pieces(base), _pieces(new)
    encoding, copying, applying = [], [], []
    for _ in range(repeats + 1):  # the first warms up
        began = time.thread_time()
        payloads = [encode(piece, old, width=2) for piece, old in zip(news, olds, strict=True)]
        encoded = time.thread_time()
        copies = [memoryview(bytearray(old)) for old in olds]
        copied = time.thread_time()
        for payload, data in zip(payloads, copies, strict=True):
            assert payload is not None, f"too much changed at {rate:g} for a delta"
            apply(payload, data, width=2)
        encoding.append(encoded - began)
        copying.append(copied - encoded)
        applying.append(time.thread_time() - copied)
        assert copies == news, "a delta did not make the version that it was made of"
    encode_s, copied_s, apply_s = (median(seconds[1:]) for seconds in (encoding, copying, applying))
    gigabytes = new.nbytes / 1e9
    conditions = (
        f"{gigabytes * 1000:.0f} MB after an AdamW step at {rate:g}, chunks of {CHUNK_BYTES / 2**20:g} MiB, GB of"
        " the full version per CPU-second of one thread; apply in place, into a copy of the base: the copy alone"
        f" {gigabytes / copied_s:.1f} GB/s, both {gigabytes / (copied_s + apply_s):.1f} GB/s; median of {repeats}"
    )
    speeds = {"delta_encode_GBps": gigabytes / encode_s, "delta_apply_GBps": gigabytes / apply_s}
    return [Row(name, speed, "GB/s", conditions) for name, speed in speeds.items()]


def _pieces(words: Words) -> list[bytes]:
    data = words.tobytes()
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def raw(tensor: Tensor) -> Bytes:
    """View a tensor as bytes; the last dimension is as many times longer as an element has bytes."""
    data: Bytes = tensor.view(torch.uint8).numpy()
    return data


def copy_s(pairs: Sequence[tuple[Bytes, Bytes]]) -> float:
    """Copy the first of each pair to the second and return the seconds."""
    began = time.perf_counter()
    for source, target in pairs:
        np.copyto(target, source)
    return time.perf_counter() - began


def roomy(shm: Path, num_bytes: float) -> Path:
    """Shared memory, or where that has no room the folder for temporary files."""
    return shm if shm.is_dir() and shutil.disk_usage(shm).free > num_bytes else Path(tempfile.gettempdir())


def main() -> None:
    """Measure, and print a report as JSON for each group of figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    size = TINY if args.dry else replace(FULL, sequences=SEQUENCES)
    shm = roomy(SHARED_MEMORY, HELD_VERSIONS * 2.0 * count_parameters(size.model))
    device_type, repeats = ("cpu", 1) if args.dry else ("cuda", REPEATS)
    for rows in groups(size, device_type=device_type, shm=shm, repeats=repeats):
        show("gpu", rows, as_json=True)


if __name__ == "__main__":
    main()
