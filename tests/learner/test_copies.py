"""Groups of ranks that each have a copy of the weights (HSDP) learn what one process does. Real processes."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from laminar_py.config.learner import Accumulate, LearnerConfig, ReduceDtype
from laminar_py.learner.distributed import group_of, join_group, leave_group
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.remote_writers import RemotePublisher
from tests.learner.builders import (
    SETTINGS,
    assert_near,
    full_parameters,
    make_learner,
    make_mixture_folder,
    make_sequences,
    pack,
    record_gradients,
)
from tests.learner.ranks import run_ranks

SEQUENCES = make_sequences((5, 17, 3, 40, 9, 2, 11, 30, 21, 8, 6, 13, 4, 19, 7, 10))
STEPS = 3
SETTINGS_OF = {
    "sharded": SETTINGS.model_copy(update={"lr": 1e-4}),
    "whole": SETTINGS.model_copy(update={"lr": 1e-4, "accumulate": Accumulate.WHOLE}),
    "offload": SETTINGS.model_copy(update={"lr": 1e-4, "offload": True}),
    "bfloat16": SETTINGS.model_copy(update={"lr": 1e-4, "reduce_dtype": ReduceDtype.BFLOAT16}),
}


def microbatches(rank, world_size):
    """All ranks together have eight, so that four of them accumulate two each."""
    pairs = [SEQUENCES[start : start + 2] for start in range(0, 16, 2)]
    return [pack(pair, num_total=16) for pair in pairs[rank::world_size]]


def gradient_gaps(metrics):
    """How far the gradient's identity is from holding, in parts of its size (law 13)."""
    sums = [sums for one in metrics for sums in one.proof.gradients]
    assert sums
    return [abs(one.expected - one.found) / one.size for one in sums]


def rank_main(rank, shard_ranks, model_folder, folder):
    """Steps under each kind of accumulation; the first also publishes, saves and steps on."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=4, shard_ranks=shard_ranks)
    for name, settings in SETTINGS_OF.items():
        learner = make_learner(model_folder, mesh=mesh, settings=settings)
        gradients = record_gradients(learner)
        metrics = [learner.step(microbatches(rank, 4)) for _ in range(STEPS)]
        assert max(gradient_gaps(metrics)) < (1e-5 if name != "bfloat16" else 1e-2)
        weights = full_parameters(learner)
        local = sum(value.to_local().numel() for value in learner.model.parameters())
        assert local >= sum(value.numel() for value in weights.values()) / (shard_ranks or 4) * 0.9
        if rank == 0:
            save_file(weights, folder / f"{name}.safetensors")
            save_file(gradients[0], folder / f"{name}-gradients.safetensors")
        if name == "sharded":
            assert learner.save(folder / "checkpoint") == ""
            publish(learner, folder, rank=rank, ranks=shard_ranks or 4)
            between = mesh.get_group(0)._get_sequence_number_for_group
            before = between()
            learner.step(microbatches(rank, 4))
            if shard_ranks == 2:
                units = sum(isinstance(module, FSDPModule) for module in learner.model.modules())
                assert between() - before == units, "groups add gradients once for two microbatches"
            stepped = full_parameters(learner)
            if rank == 0:
                save_file(stepped, folder / "stepped.safetensors")
    leave_group()


def publish(learner, folder, *, rank=0, ranks=1):
    """Publish together with the other ranks of the first group; a group of two is on two hosts."""
    writers = 1 if ranks == 2 else ranks
    group = group_of(ranks) if writers < ranks else None
    if rank == 0:
        publisher = Publisher(folder / "store", ranks=writers, group=group)
    learner.ranks.sum(0.0)
    if 0 < rank < writers:
        publisher = Publisher(folder / "store", rank=rank, ranks=writers)
    elif group is not None and rank:
        publisher = RemotePublisher(group, rank=rank, writers=writers)
    if rank < ranks:
        publisher.publish_sources(0, learner.sources(dtype=torch.bfloat16, gather=False))
        if rank == 0:
            (folder / "digest").write_text(publisher.completed(0).digest)
        publisher.close()


def load_main(rank, world_size, shard_ranks, model_folder, checkpoint, folder):
    """A step from a checkpoint of another layout."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=world_size, shard_ranks=shard_ranks)
    learner = make_learner(model_folder, mesh=mesh, settings=SETTINGS_OF["sharded"])
    assert learner.load(checkpoint) == ""
    learner.step(microbatches(rank, world_size))
    stepped = full_parameters(learner)
    if rank == 0:
        save_file(stepped, folder / "stepped.safetensors")
    leave_group()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_mixture_folder(tmp_path_factory.mktemp("mixture") / "model")


@pytest.fixture(scope="module")
def layouts(model_folder, mixture, tmp_path_factory):
    """The folders in which four ranks ran as 2 x 2 (also of a mixture) and as 4, by name."""
    found = {}
    for name, shard_ranks, model in (("2 x 2", 2, model_folder), ("4", None, model_folder), ("moe", 2, mixture)):
        found[name] = tmp_path_factory.mktemp("layout")
        run_ranks(rank_main, shard_ranks, model, found[name], world_size=4)
    return found


@pytest.fixture(scope="module")
def alone(model_folder, mixture):
    """Weights after the same steps of one process, and the gradients of its first, by model."""
    found = {}
    for name, model in (("2 x 2", model_folder), ("moe", mixture)):
        learner = make_learner(model, settings=SETTINGS_OF["sharded"])
        gradients = record_gradients(learner)
        for _ in range(STEPS):
            learner.step(microbatches(0, 1))
        found[name] = full_parameters(learner), gradients[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2 x 2", "moe"])
@pytest.mark.parametrize("kind", ["sharded", "whole", "offload"])
def test_two_groups_of_two_ranks_reach_the_weights_of_one_process(layouts, alone, layout, kind):
    weights, gradients = alone[layout]
    assert_near(load_file(layouts[layout] / f"{kind}-gradients.safetensors"), gradients, rel=1e-6)
    found = load_file(layouts[layout] / f"{kind}.safetensors")
    assert_near(found, weights, rel=1e-6)


def test_a_reduction_in_bfloat16_rounds_gradients_and_no_weights(layouts, alone):
    weights, gradients = alone["2 x 2"]
    found = load_file(layouts["2 x 2"] / "bfloat16-gradients.safetensors")
    assert_near(found, gradients, rel=2e-2)
    with pytest.raises(AssertionError):
        assert_near(found, gradients, rel=1e-4)
    after = load_file(layouts["2 x 2"] / "bfloat16.safetensors")
    assert_near(after, weights, rel=1e-3)
    assert any((value != value.bfloat16().float()).any() for value in after.values()), "masters stay fp32"


def test_what_groups_publish_is_what_one_process_would_of_their_weights(layouts, model_folder, tmp_path):
    folder = layouts["2 x 2"]
    learner = make_learner(model_folder, settings=SETTINGS_OF["sharded"])
    learner.load(folder / "checkpoint")
    publish(learner, tmp_path)
    assert (tmp_path / "digest").read_text() == (folder / "digest").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "shard_ranks"), [(1, None), (4, None), (4, 1)])
def test_a_checkpoint_of_groups_loads_in_any_layout(layouts, model_folder, tmp_path, world_size, shard_ranks):
    checkpoint = layouts["2 x 2"] / "checkpoint"
    run_ranks(load_main, world_size, shard_ranks, model_folder, checkpoint, tmp_path, world_size=world_size)
    assert_near(
        load_file(tmp_path / "stepped.safetensors"),
        load_file(layouts["2 x 2"] / "stepped.safetensors"),
        rel=1e-6,
    )


def test_a_checkpoint_of_groups_has_each_value_once(layouts):
    sizes = [
        sum(path.stat().st_size for path in (layouts[name] / "checkpoint").glob("*.distcp"))
        for name in ("2 x 2", "4")
    ]
    assert sizes[0] < sizes[1], "it has fewer parts, each with a header"


def test_groups_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match=r"learner\.shard_ranks=4: .*world_size=6; set it to 1, 2, 3, 6, or"):
        LearnerConfig(world_size=6, shard_ranks=4)
    with pytest.raises(ValueError, match=r"learner\.shard_ranks=8: "):
        LearnerConfig(world_size=4, shard_ranks=8)
