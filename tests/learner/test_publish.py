"""Ranks that each write their rows publish the bytes that one process would. Real processes over gloo."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.core_model_loading import revert_weight_conversion

from laminar_py.config.data import ModelConfig
from laminar_py.learner.distributed import group_of, join_group, leave_group
from laminar_py.learner.export import WeightExporter
from laminar_py.learner.model import gather_full
from laminar_py.learner.sharding import shard
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.remote_writers import RemotePublisher
from laminar_py.relay.version_store import SPARE
from tests.learner.builders import VOCAB, make_mixture_folder, make_model_folder
from tests.learner.ranks import run_ranks

CASES = {  # model and masters' dtype; 61 rows, 32 columns and 8 experts are uneven over 2 or 3 ranks
    "dense": torch.float32,
    "tied": torch.float32,
    "bfloat16": torch.bfloat16,
    "qwen3_moe": torch.float32,
    "mixtral": torch.float32,
}
DTYPES = (torch.bfloat16, torch.float32)
VERSIONS = 4  # the last are written over the pages of the first, which each rank has mapped


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model_folder(folder / "dense")
    make_model_folder(folder / "tied", tied=True)
    make_model_folder(folder / "bfloat16")
    make_mixture_folder(folder / "qwen3_moe")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, vocab_size=VOCAB, num_key_value_heads=2, num_local_experts=5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "mixtral")
    return folder


def loaded(models: Path, case: str):
    return AutoModelForCausalLM.from_pretrained(models / case, dtype=CASES[case])


def train(model) -> None:
    """Stands for a step: changes each weight, whatever its shard."""
    with torch.no_grad():
        for parameter in model.parameters():
            values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            values.mul_(1.25)


def store_of(folder: Path, case: str, dtype: torch.dtype) -> Path:
    return folder / f"{case}-{dtype}".replace("torch.", "")


def retire(store: Path, version: int) -> None:
    """As the root does."""
    if not (store / SPARE).exists() and version:
        (store / f"v{version - 1}").rename(store / SPARE)


def write_main(rank: int, world_size: int, writers: int, models: Path, folder: Path) -> None:
    """Publish with the first ranks as writers; the others have no access to the store."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=world_size)
    group = group_of(world_size) if writers < world_size else None
    for case in CASES:
        for dtype in DTYPES:
            model = loaded(models, case)
            shard(model, mesh, source=ModelConfig(path=models / case))
            exporter, store = WeightExporter(model), store_of(folder, case, dtype)
            open_here = partial(
                Publisher, store, chunk_bytes=4096, shard_bytes=200_000, rank=rank, ranks=writers, group=group
            )
            publisher = open_here() if rank == 0 else None
            torch.distributed.barrier()
            if 0 < rank < writers:
                publisher = open_here()
            elif rank:
                publisher = RemotePublisher(group, rank=rank, writers=writers, shard_bytes=200_000)
            inodes = []
            for version in range(VERSIONS):
                sources = exporter.sources(dtype=dtype, gather=False, writes_whole=rank == 0)
                publisher.publish_sources(version, sources)
                train(model)
                if rank == 0:
                    (store / f"digest-{version}").write_text(publisher.completed(version).digest)
                    inodes.append((store / f"v{version}/model-00001.safetensors").stat().st_ino)
                    retire(store, version)
            assert inodes[2:] == inodes[:2][: len(inodes)], "the ranks share the files that they have open"
            publisher.close()
    leave_group()


def publish_alone(models: Path, folder: Path, case: str, dtype: torch.dtype) -> list[str]:
    """Digests of the versions that one process publishes of full tensors, which it casts and converts before."""
    model = loaded(models, case)
    names = [name for name, _ in model.named_parameters()]
    publisher = Publisher(store_of(folder, case, dtype), chunk_bytes=4096, shard_bytes=200_000)
    digests = []
    for version in range(VERSIONS):
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors |= revert_weight_conversion(model, {name: model.state_dict()[name].to(dtype)})
        publisher.publish(version, [(name, tensor.contiguous()) for name, tensor in tensors.items()])
        digests.append(publisher.completed(version).digest)
        train(model)
    publisher.close()
    return digests


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[str]]:
    folder = tmp_path_factory.mktemp("alone")
    cases = [(case, dtype) for case in CASES for dtype in DTYPES]
    return {store_of(Path(), *one): publish_alone(models, folder, *one) for one in cases}


@pytest.mark.parametrize(("world_size", "writers"), [(1, 1), (2, 2), (3, 3), (3, 2)])
def test_any_number_of_ranks_publishes_the_bytes_of_one_process(
    models: Path, alone: dict[Path, list[str]], tmp_path: Path, world_size: int, writers: int
):
    run_ranks(write_main, world_size, writers, models, tmp_path, world_size=world_size)
    for store, digests in alone.items():
        found = [(tmp_path / store / f"digest-{version}").read_text() for version in range(VERSIONS)]
        assert found == digests, store


def gathered_main(rank: int, world_size: int, models: Path, folder: Path) -> None:
    """A tensor without rows of its own in the files is gathered, and written by rank 0."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=world_size)
    model = loaded(models, "dense")
    shard(model, mesh, source=ModelConfig(path=models / "dense"))
    exporter = WeightExporter(model)
    for gather in (False, True):
        sources = exporter.sources(dtype=torch.bfloat16, gather=gather, writes_whole=rank == 0)
        found = {name: values for source in sources for name, _, values in source.read()}
        whole = {name: gather_full(tensor, torch.bfloat16) for name, tensor in model.state_dict().items()}
        if gather:
            assert found.keys() == (whole.keys() if rank == 0 else set())
            assert all(torch.equal(found[name], whole[name]) for name in found)
        else:
            assert sum(values.numel() for values in found.values()) < sum(w.numel() for w in whole.values())
    leave_group()


def test_gathered_tensors_are_rank_0s(models: Path, tmp_path: Path):
    run_ranks(gathered_main, 2, models, tmp_path, world_size=2)


def test_sources_of_one_process_alias_its_masters(models: Path):
    """So the publish makes no tensor between masters and files."""
    model = loaded(models, "qwen3_moe")
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sources = WeightExporter(model).sources(dtype=torch.bfloat16, gather=False)
    rows = [values for source in sources for _, _, values in source.read()]
    assert {values.untyped_storage().data_ptr() for values in rows} <= storages
    assert sum(values.numel() for values in rows) == sum(parameter.numel() for parameter in model.parameters())


def test_published_files_have_the_names_and_values_of_the_folder(models: Path, tmp_path: Path):
    model = loaded(models, "mixtral")
    publisher = Publisher(tmp_path / "store")
    publisher.publish_sources(1, WeightExporter(model).sources(dtype=torch.float32, gather=False))
    publisher.completed(1)
    publisher.close()
    (ours,), (theirs,) = (
        list(folder.glob("*.safetensors")) for folder in (tmp_path / "store/v1", models / "mixtral")
    )
    with safe_open(ours, "pt") as found, safe_open(theirs, "pt") as expected:
        assert set(found.keys()) == set(expected.keys())
        assert all(found.get_tensor(name).equal(expected.get_tensor(name)) for name in expected.keys())  # noqa: SIM118
