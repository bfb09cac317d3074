"""Each rank makes, reads and keeps its own shard of weights and gradients alone. Real processes over gloo."""

import ctypes
import gc
import threading
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import Accumulate, LearnerConfig, LoraConfig
from laminar_py.config.section import ConfigError
from laminar_py.learner.distributed import join_group, leave_group, share_record
from laminar_py.learner.model import load_policy
from laminar_py.learner.sharding import shard
from laminar_py.learner.step import Learner
from tests.learner import builders
from tests.learner.builders import (
    SETTINGS,
    assert_near,
    full_parameters,
    make_learner,
    make_llama_folder,
    make_mixture_folder,
    make_model_folder,
    make_sequences,
    pack,
    record_gradients,
)
from tests.learner.ranks import run_ranks

CPU = torch.device("cpu")
KINDS = {
    "rows that do not divide": make_model_folder,  # 61 of the embeddings
    "tied": lambda folder: make_model_folder(folder, tied=True),
    "llama": make_llama_folder,
    "experts, one by one in files": make_mixture_folder,
    "fewer experts than ranks": lambda folder: make_mixture_folder(folder, num_experts=2),  # of the four
}
LORA = LearnerConfig(lr=1e-2, lora=LoraConfig(rank=4))
SEQUENCES = make_sequences((5, 17, 3, 40, 9, 2, 11, 30))


def whole(folder: Path):
    """As one process has it."""
    return load_policy(ModelConfig(path=folder), seed=0, temperature=1.0, device=CPU)


def full(model) -> dict[str, torch.Tensor]:
    return {name: builders._full(value.detach()) for name, value in model.named_parameters()}


class Digest(msgspec.Struct, frozen=True):
    text: str


def weights_main(rank: int, world_size: int, folder: Path) -> None:
    """Load every kind of model, with adapters, beside a reference, and drawn from a seed."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / f"rendezvous-{world_size}"), rank=rank, world_size=world_size)
    for kind in KINDS:
        learner = make_learner(folder / kind, mesh=mesh)
        expected = whole(folder / kind)
        found, wanted = full(learner.model), full(expected)
        assert found.keys() == wanted.keys(), kind
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), kind
        held = sum(value.to_local().numel() for value in learner.model.parameters())
        assert held <= 0.6 * sum(value.numel() for value in wanted.values()), kind
        buffers = dict(learner.model.named_buffers())
        assert all(torch.equal(buffers[name], value) for name, value in expected.named_buffers()), kind
        learner.step([pack(SEQUENCES[rank::world_size], num_total=len(SEQUENCES))])  # it can be trained
    refers = AlgorithmConfig(kl_coef=0.1)
    beside = make_learner(folder / "llama", mesh=mesh, algorithm=refers)
    found, wanted = full(beside._reference.model), full(whole(folder / "llama"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    adapted = make_learner(folder / "tied", mesh=mesh, settings=LORA)
    found, wanted = full(adapted.model), full(make_learner(folder / "tied", settings=LORA).model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert share_record(Digest("of rank 0") if rank == 0 else None, Digest, mesh=mesh) == Digest("of rank 0")
    drawn = ModelConfig(path=folder / "tied", from_scratch=True)
    fresh = Learner(drawn, SETTINGS, AlgorithmConfig(), temperature=1.0, seed=3, mesh=mesh)
    weights = full_parameters(fresh)
    if rank == 0:
        save_file(weights, folder / f"drawn-{world_size}.safetensors")
    leave_group()


@pytest.mark.slow
def test_shards_have_the_weights_of_the_files_whatever_the_model(tmp_path: Path):
    for kind, make in KINDS.items():
        make(tmp_path / kind)
    for world_size in (2, 4):
        run_ranks(weights_main, world_size, tmp_path, world_size=world_size)
    two, four = (load_file(tmp_path / f"drawn-{world_size}.safetensors") for world_size in (2, 4))
    assert all(torch.equal(two[name], tensor) for name, tensor in four.items())
    embedding, norm = two["model.embed_tokens.weight"], two["model.norm.weight"]
    assert embedding.std() == pytest.approx(0.1, rel=0.1)  # of config.json
    assert torch.equal(norm, torch.ones_like(norm))


class MallInfo2(ctypes.Structure):
    """Counts of the C library's allocator, in bytes."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "mapped",
            "usmblks",
            "fsmblks",
            "in_heap",
            "free",
            "keepcost",
        ]
    ]


def allocated_bytes() -> int:
    """Memory that this process has asked for, in heaps or mapped, without the holes between."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallInfo2
    counts = ask()
    return counts.in_heap + counts.mapped


class Peak:
    """The most that this process holds beyond what it held at the start, looked at every millisecond."""

    def __enter__(self) -> "Peak":
        self.bytes, self._start, self._done = 0, allocated_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, allocated_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def host_main(rank: int, folder: Path, limit: int, on_meta: bool) -> None:
    torch.set_num_threads(1)
    mesh = join_group(str(folder / f"rendezvous-{on_meta}"), rank=rank, world_size=2)
    make_learner(folder / "small", mesh=mesh)  # what the first one imports is no weight
    drawn = ModelConfig(path=folder / "model", from_scratch=True)
    for source in (ModelConfig(path=folder / "model"), drawn)[: 1 + on_meta]:
        gc.collect()  # the one before
        with Peak() as peak:
            model = load_policy(source, seed=0, temperature=1.0, device=CPU, on_meta=on_meta)
            shard(model, mesh, source=source)
        held = f"{peak.bytes / 2**20:.0f} MiB, {limit / 2**20:.0f} allowed, {source}"
        assert (peak.bytes <= limit) is on_meta, held
        del model
    leave_group()


def test_a_rank_never_holds_more_on_the_host_than_its_shards_and_a_tensor(tmp_path: Path):
    """Where it is not made on the meta device it does, which shows that this is seen."""
    config = Qwen3Config(
        vocab_size=16_000,
        hidden_size=768,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=3072,
        max_position_embeddings=128,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": "1.0"}')
    make_model_folder(tmp_path / "small")
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    slack = 16 << 20  # of what else a model is
    limit = sum(sizes) // 2 + max(sizes) + slack
    assert limit < 0.75 * sum(sizes)
    for on_meta in (True, False):
        run_ranks(host_main, tmp_path, limit, on_meta, world_size=2)


def test_a_weight_that_is_in_no_file_is_named(tmp_path: Path):
    folder = make_model_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    mesh = join_group(str(tmp_path / "rendezvous"), rank=0, world_size=1)
    try:
        source = ModelConfig(path=folder)
        model = load_policy(source, seed=0, temperature=1.0, device=CPU, on_meta=True)
        with pytest.raises(
            ConfigError, match=r"^model\.path=.*: its safetensors have no model\.norm\.weight; name"
        ):
            shard(model, mesh, source=source)
    finally:
        leave_group()


def gradients_main(rank: int, model_folder: Path, folder: Path) -> None:
    """A step of two microbatches a rank, either way, with a look at the gradients before the second."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=2)
    for way in Accumulate:
        learner = make_learner(
            model_folder, mesh=mesh, settings=SETTINGS.model_copy(update={"accumulate": way, "grad_clip": 1e9})
        )
        held: list[int] = []

        def look(*_: object, held: list[int] = held, learner: Learner = learner) -> None:
            gradients = [p.grad for p in learner.model.parameters() if p.grad is not None]
            assert all(gradient.dtype == torch.float32 for gradient in gradients)
            held.append(sum(gradient.to_local().numel() for gradient in gradients))

        learner.model.register_forward_pre_hook(look, prepend=True)  # before FSDP gathers
        updates = record_gradients(learner)
        pairs = [SEQUENCES[start : start + 2] for start in (0, 2, 4, 6)][rank::2]
        learner.step([pack(pair, num_total=8) for pair in pairs])
        own = sum(p.to_local().numel() for p in learner.model.parameters())
        assert held == [0, own if way is Accumulate.SHARDED else 0], (way, held, own)
        if rank == 0:
            save_file(updates[0], folder / f"{way}.safetensors")
    leave_group()


def test_gradients_that_each_microbatch_adds_to_the_shards_are_those_of_one_big_microbatch(
    model_folder: Path, tmp_path: Path
):
    run_ranks(gradients_main, model_folder, tmp_path, world_size=2)
    learner = make_learner(model_folder, settings=SETTINGS.model_copy(update={"grad_clip": 1e9}))
    updates = record_gradients(learner)
    learner.step([pack(SEQUENCES, num_total=8)])
    for way in Accumulate:
        assert_near(load_file(tmp_path / f"{way}.safetensors"), updates[0], rel=1e-5)


def test_one_rank_on_its_own_memory_does_the_same_either_way(model_folder: Path, tmp_path: Path):
    mesh = join_group(str(tmp_path / "rendezvous"), rank=0, world_size=1)
    try:
        ends = []
        for way in Accumulate:
            learner = make_learner(
                model_folder, mesh=mesh, settings=SETTINGS.model_copy(update={"accumulate": way})
            )
            learner.step([pack(SEQUENCES[:4], num_total=8), pack(SEQUENCES[4:], num_total=8)])
            ends.append(full_parameters(learner))
        assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    finally:
        leave_group()
