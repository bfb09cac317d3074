"""Visit 1, two ranks that share a GPU train as one does: `python -m experiments.gpu.two_ranks CASE ... [--dry]`.

NCCL refuses two ranks on one device, so gloo carries their collectives (`probe` tries each of them first). In a
case, both ranks and one rank alone take the same 20 steps from the same start. Then the two publish, save a
checkpoint, and take one more step; the one loads that checkpoint and takes the same step. All weights have an
uneven number of rows somewhere. With `--dry` ranks are on a CPU, where layers compute in fp32 alone.
"""

import argparse
import math
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen3Config, Qwen3MoeConfig

from experiments.gpu.steps import GpuStep, open_learner
from laminar_lab.bench.relay_pair import receive, worker
from laminar_lab.bench.report import Row, show
from laminar_lab.bench.workplace import write_model
from laminar_py.config.learner import Attention, LearnerConfig
from laminar_py.learner import Learner, join_group, leave_group, model, sharding
from laminar_py.learner.kernel_check import Choice
from laminar_py.records.trajectory import MicroBatch
from laminar_py.relay import Publisher

RANKS, STEPS = 2, 20
MOST = {"fp32": 1e-5, "bf16": 1e-2}  # largest difference, relative
PROBE = "probe"
LR = 1e-4

WIDE = {"vocab_size": 8191, "hidden_size": 512, "num_hidden_layers": 6, "head_dim": 64}  # 25 million parameters
NARROW = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}


def cases(*, dry: bool) -> dict[str, GpuStep]:
    """Models by case; rows of the embedding, of the MLP and the experts are an uneven number."""
    sizes = {**(NARROW if dry else WIDE), **HEADS}
    dense = Qwen3Config(**sizes, intermediate_size=63 if dry else 1407)
    experts = {"num_experts": 9, "num_experts_per_tok": 2, "norm_topk_prob": True}
    mixture = Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=24 if dry else 192)
    step = partial(GpuStep, sequences=8 if dry else 24, median=12 if dry else 200, max_tokens=64 if dry else 4096)
    return {
        "dense": step(model=dense, settings=LearnerConfig(lr=LR)),
        "mixture": step(model=mixture, settings=LearnerConfig(lr=LR)),
        "offload": step(model=dense, settings=LearnerConfig(lr=LR, offload=True)),
    }


# ---- what each rank does


def guarded(work: Callable[[Connection], None], pipe: Connection) -> None:
    """Run `work`, and send an error as text in place of an answer."""
    try:
        work(pipe)
    except Exception:
        pipe.send(traceback.format_exc())
        raise


def probe_rank(pipe: Connection, *, folder: Path, device_type: str, rank: int) -> None:
    """Try FSDP's collectives and send an empty text for each that is right, else its error."""
    mesh = join_group(
        str(folder / "rendezvous"), rank=rank, world_size=RANKS, device_type=device_type, on_cuda="gloo"
    )
    ours, sums = torch.full((4,), rank + 1.0, device=device_type), torch.full((4,), 3.0, device=device_type)
    halves, half = torch.zeros(8, device=device_type), torch.zeros(2, device=device_type)
    collectives: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "all_gather_into_tensor": lambda: (
            _after(dist.all_gather_into_tensor, halves, ours),
            torch.tensor([1.0, 2.0], device=device_type).repeat_interleave(4),
        ),
        "reduce_scatter_tensor": lambda: (_after(dist.reduce_scatter_tensor, half, ours), sums[:2]),
        "all_reduce": lambda: (_after(dist.all_reduce, ours.clone()), sums),
        "broadcast": lambda: (_after(partial(dist.broadcast, src=0), ours.clone()), torch.ones_like(ours)),
    }
    found: dict[str, str] = {}
    for name, call in collectives.items():
        try:
            result, wanted = call()
            found[name] = "" if torch.equal(result, wanted) else f"gives {result.tolist()}"
        except RuntimeError as error:
            found[name] = str(error).strip().partition("\n")[0]
    pipe.send(found)
    assert mesh.size() == RANKS, "both ranks have joined"
    leave_group()


def _after(collective: Callable[..., object], target: Tensor, *others: Tensor) -> Tensor:
    collective(target, *others)
    return target


def train_rank(
    pipe: Connection,
    *,
    folder: Path,
    size: GpuStep,
    device_type: str,
    precision: str,
    rank: int,
    ranks: int,
) -> None:
    """Take the steps of a rank and send [losses], [gradient norms], then the figures of `after_steps`."""
    torch.set_num_threads(1)
    step = partial(drawn_batches, size, rank=rank, ranks=ranks)
    with ExitStack() as stack:
        if precision == "fp32" and device_type == "cuda":
            stack.enter_context(fp32_layers())
        place = folder / f"{ranks}"
        place.mkdir(exist_ok=True)
        start = folder / "start"
        learner = stack.enter_context(
            open_learner(place, size, device_type=device_type, start=start, rank=rank, ranks=ranks)
        )
        steps = [learner.step(step(seed)) for seed in range(STEPS)]
        pipe.send(([one.loss for one in steps], [one.grad_norm for one in steps]))
        found = after_steps(learner, folder, place, rank=rank)
        found["next_loss"] = learner.step(step(STEPS)).loss
        pipe.send(found)


def drawn_batches(size: GpuStep, seed: int, *, rank: int, ranks: int) -> list[MicroBatch]:
    """The microbatches of a step, as if a uniform policy had drawn their tokens."""
    uniform = np.float32(-math.log(size.model.vocab_size))
    return [
        msgspec.structs.replace(batch, behaviour_logprobs=np.full_like(batch.behaviour_logprobs, uniform))
        for batch in size.batches(seed, rank=rank, ranks=ranks)
    ]


def after_steps(learner: Learner, folder: Path, place: Path, *, rank: int) -> dict[str, float]:
    """Keep the weights; two ranks then publish and save, and one rank loads their checkpoint.

    Returns largest differences: of the published weights from the learner's, of the loaded from the saved.
    """
    weights = host_weights(learner, torch.float32)
    if rank == 0:
        save_file(weights, place / "weights.safetensors")
    if place.name == "1":
        saved = load_file(folder / f"{RANKS}" / "weights.safetensors")
        fault = learner.load(folder / f"{RANKS}" / "checkpoint")
        assert not fault, fault
        return {"checkpoint": largest_difference(host_weights(learner, torch.float32), saved)}
    found = {}
    if rank == 0:
        publisher = Publisher(place / "store", ranks=RANKS)
    dist.barrier()
    if rank:
        publisher = Publisher(place / "store", rank=rank, ranks=RANKS)
    publisher.publish_sources(1, learner.sources(dtype=torch.bfloat16, gather=False))
    if rank == 0:
        publisher.completed(1)
    publisher.close()
    if rank == 0:
        read: dict[str, Tensor] = {}
        for file in (place / "store/v1").glob("*.safetensors"):
            read |= load_file(file)
        found["publish"] = largest_difference(read, {name: value.bfloat16() for name, value in weights.items()})
    fault = learner.save(place / "checkpoint")
    assert not fault, fault
    return found


def host_weights(learner: Learner, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights in full, copied to the host. Collective."""
    return {name: tensor.detach().cpu().clone() for name, tensor in learner.named_tensors(dtype=dtype)}


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference of any element."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    return max(float((found[name].float() - wanted[name].float()).abs().max()) for name in wanted)


@contextmanager
def fp32_layers() -> Iterator[None]:
    """Have a GPU's layers compute in fp32, as on a CPU: no other run does, so there is no setting for it."""
    before = sharding.MixedPrecisionPolicy, model.choose_kernel
    sharding.MixedPrecisionPolicy = lambda **_: MixedPrecisionPolicy()  # type: ignore[assignment, misc]
    model.choose_kernel = lambda *_, **__: Choice(Attention.SDPA)
    try:
        yield
    finally:
        sharding.MixedPrecisionPolicy, model.choose_kernel = before  # type: ignore[misc]


# ---- figures


def answers(ranks: Sequence[Callable[[Connection], None]], count: int) -> list[list[Any]]:
    """Run ranks side by side, and return the `count` messages of each. Raises `RuntimeError` if one fails."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(worker(partial(guarded, rank))) for rank in ranks]
        found: list[list[Any]] = [[] for _ in pipes]
        for _ in range(count):
            for messages, pipe in zip(found, pipes, strict=True):
                messages.append(receive(pipe))
                if isinstance(messages[-1], str):
                    raise RuntimeError(messages[-1])
    return found


def probe_rows(folder: Path, device_type: str) -> list[Row]:
    """Whether each collective runs between two ranks on the device."""
    probe = partial(probe_rank, folder=folder, device_type=device_type)
    (found,), _ = answers([partial(probe, rank=rank) for rank in range(RANKS)], 1)
    return [
        Row(
            f"gloo_{name}",
            float(not fault),
            "1: runs",
            f"{device_type} tensors, torch {torch.__version__}; {fault}",
        )
        for name, fault in found.items()
    ]


def case_rows(folder: Path, case: str, size: GpuStep, device_type: str, precision: str) -> list[Row]:
    """Differences of two ranks from one."""
    write_model(folder / "start", size.model)
    train = partial(train_rank, folder=folder, size=size, device_type=device_type, precision=precision)
    (pair, other) = answers([partial(train, rank=rank, ranks=RANKS) for rank in range(RANKS)], 2)
    (alone,) = answers([partial(train, rank=0, ranks=1)], 2)
    assert pair[0] == other[0], f"the two ranks report different steps: {pair[0]} and {other[0]}"
    (losses, norms), (wanted, wanted_norms) = pair[0], alone[0]
    weights, expected = (load_file(folder / name / "weights.safetensors") for name in (f"{RANKS}", "1"))
    moved = max(float((weights[name] - expected[name]).norm() / expected[name].norm()) for name in expected)
    what = f"{RANKS} ranks over gloo on one {device_type}, layers in {precision}, {STEPS} steps at {LR:g}"
    loss = relative(losses, wanted)
    after = abs(pair[1]["next_loss"] - alone[1]["next_loss"]) / max(map(abs, wanted))
    exact = pair[1]["publish"] == 0.0 and alone[1]["checkpoint"] == 0.0
    holds = max(loss, after) <= MOST[precision] and exact and (precision == "bf16" or moved <= MOST[precision])
    figures = [
        (
            "holds",
            float(holds),
            "1: yes",
            f"losses, and weights in fp32, within {MOST[precision]:g}; published and loaded exactly",
        ),
        ("loss_difference", loss, "of the largest loss", f"losses {wanted[0]:.4f} to {wanted[-1]:.4f}"),
        ("norm_difference", relative(norms, wanted_norms), "of the largest gradient norm", ""),
        ("weights_difference", moved, "of a tensor's norm, the worst", ""),
        (
            "publish_difference",
            pair[1]["publish"],
            "the largest of an element",
            "bf16, read from the version's files",
        ),
        (
            "checkpoint_difference",
            alone[1]["checkpoint"],
            "the largest of an element",
            "saved by two, loaded by one",
        ),
        ("next_loss_difference", after, "of the largest loss", "one more step, by one rank from the checkpoint"),
    ]
    return [
        Row(f"{case}_{precision}_{name}", value, unit, f"{more}; {what}") for name, value, unit, more in figures
    ]


def relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Largest difference over the largest value."""
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True)) / max(map(abs, wanted))


def main() -> None:
    """Measure cases and print their reports as JSON; exit code 1 if a comparison does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=[PROBE, *cases(dry=True)])
    parser.add_argument("--dry", action="store_true", help="on a CPU, a tiny model")
    args = parser.parse_args()
    device_type = "cpu" if args.dry else "cuda"
    multiprocessing.set_forkserver_preload([__spec__.name])  # or each rank spends seconds on imports
    wrong = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        for case in args.cases:
            for precision in ("",) if case == PROBE else ("fp32",) if args.dry else ("fp32", "bf16"):
                folder = Path(name) / f"{case}-{precision}"
                folder.mkdir()
                rows = (
                    probe_rows(folder, device_type)
                    if case == PROBE
                    else case_rows(folder, case, cases(dry=args.dry)[case], device_type, precision)
                )
                show("gpu", rows, as_json=True)
                wrong += [row.name for row in rows if row.unit.startswith("1: ") and not row.value]
    if wrong:
        sys.exit(f"two_ranks: {', '.join(wrong)}: does not hold")


if __name__ == "__main__":
    main()
