"""Memory of GPUs that learner and replicas share: what coexists in each turn, and what to give up where it cannot.

The figures are of a Qwen2.5-7B with adapters of rank 32 on one GPU of 80 GB, computed by hand.
"""

import json
import re

import pytest

from laminar_lab.doctor.memory import LEARNERS_TURN, REPLICAS_TURN, gpu_memory, memory_faults, memory_warnings
from laminar_py.config.loading import load_config
from tests.doctor.test_memory import QWEN_7B
from tests.runs.runs import REPO

PARAMETERS = 7_615_616_512
ADAPTERS = 32 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944))
STATES = 4.0 * (PARAMETERS + ADAPTERS) + 4.0 * ADAPTERS + 8.0 * ADAPTERS  # masters, gradients, moments
SPARE = 0.05 * 80e9
LEFT = 80e9 - STATES - SPARE  # to an engine, between the learner's turns
WEIGHTS, GRAPHS = 2.0 * PARAMETERS, 0.15 * LEFT
TOKEN = 2 * 4 * 128 * 28 * 2.0  # keys and values of four heads of 128 in 28 layers, bf16


def shared(folder, *settings):
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return load_config(
        REPO / "experiments/lora/7b_4gpu.yaml",
        [
            f"model.path={folder}",
            "cluster.share=true",
            "learner.world_size=1",
            "learner.recompute=all",
            "rollout.engine.tensor_parallel=1",
            "rollout.kv_capacity=200000",
            *settings,
        ],
    )


def test_states_stay_in_the_replicas_turn_and_the_engine_in_the_learners(tmp_path):
    learners, replicas = gpu_memory(shared(tmp_path))
    alone, _ = gpu_memory(shared(tmp_path, "cluster.share=false"))
    assert (learners.kind, replicas.kind) == (LEARNERS_TURN, REPLICAS_TURN)
    assert replicas.total == pytest.approx(STATES + SPARE + WEIGHTS + 200_000 * TOKEN + GRAPHS)
    assert replicas.total == pytest.approx(69.09e9, rel=1e-3)
    assert learners.total == pytest.approx(alone.total + WEIGHTS + GRAPHS)
    assert "activations" not in replicas.parts
    assert "KV cache" not in learners.parts


def test_a_cache_that_is_kept_counts_in_both_turns(tmp_path):
    kept = shared(tmp_path, "cluster.lease.cache=keep", "rollout.kv_capacity=150000")
    released = shared(tmp_path, "rollout.kv_capacity=150000")
    (learners, _), (without, _) = gpu_memory(kept), gpu_memory(released)
    assert learners.total - without.total == pytest.approx(150_000 * TOKEN)


def test_the_most_tokens_of_a_cache_are_of_the_static_share_and_of_both_turns_if_it_is_kept(tmp_path):
    released, kept = (
        gpu_memory(shared(tmp_path, f"cluster.lease.cache={cache}")) for cache in ("release", "keep")
    )
    assert released[1].fitting == int((0.85 * LEFT - WEIGHTS) / TOKEN) == 390_234
    peak = released[0].total
    assert kept[1].fitting == int((80e9 - peak) / TOKEN)


def test_the_most_tokens_of_a_microbatch_fit_beside_the_engine(tmp_path):
    learners, _ = gpu_memory(shared(tmp_path))
    at_most = shared(tmp_path, f"packer.max_tokens={learners.fitting}")
    assert memory_faults(at_most) == []
    assert len(memory_warnings(at_most, gpu_bytes=80e9)) == 1
    assert len(memory_faults(shared(tmp_path, f"packer.max_tokens={learners.fitting + 1}"))) == 1


@pytest.mark.parametrize(
    ("settings", "line", "changes"),
    [
        (
            ["rollout.kv_capacity=400000"],
            r"cluster.share=true: a shared GPU in the replicas' turn needs 80.6 GB and has 80.0;"
            r" lower rollout.kv_capacity to 390000",
            ["rollout.kv_capacity=390000"],
        ),
        (
            ["cluster.lease.cache=keep"],
            r"cluster.share=true: a shared GPU in the learner's turn needs 82.1 GB .*;"
            r" lower rollout.kv_capacity to 162000",
            ["rollout.kv_capacity=162000"],
        ),
        (
            ["cluster.lease.cache=keep", "packer.max_tokens=30000"],
            r".* needs 88.4 GB .*; lower rollout.kv_capacity to 54000",
            ["rollout.kv_capacity=54000"],
        ),
        (
            ["cluster.lease.cache=keep", "packer.max_tokens=35000"],
            r".*; set cluster.lease.cache=release",
            ["cluster.lease.cache=release"],
        ),
        (
            ["learner.recompute=selective"],
            r"cluster.share=true: a shared GPU in the learner's turn needs 98.1 GB .*; set learner.recompute=all",
            ["learner.recompute=all"],
        ),
        (
            ["learner.lora=null"],
            r"cluster.share=true: a shared GPU in the learner's turn needs 157.5 GB .*;"
            r" train by adapter \(learner.lora\)",
            ["learner.lora.rank=32"],
        ),
        (
            ["packer.max_tokens=40000", "learner.lora.rank=8"],
            r".* in the learner's turn .*; raise learner.world_size to 2",
            ["learner.world_size=2"],
        ),
    ],
)
def test_what_cannot_coexist_is_refused_with_the_part_to_give_up(settings, line, changes, tmp_path):
    (found,) = memory_faults(shared(tmp_path, *settings))
    assert re.fullmatch(line, found), found
    assert memory_faults(shared(tmp_path, *settings, *changes)) == []


def test_where_no_setting_helps_sharing_is_given_up(tmp_path):
    (line,) = memory_faults(shared(tmp_path, "packer.max_tokens=400000"))
    assert line.endswith("; set it to false, and give replicas GPUs of their own")


def test_replicas_beyond_the_ranks_have_a_column_of_their_own(tmp_path):
    config = shared(tmp_path, "rollout.replicas=3")
    assert [column.kind for column in gpu_memory(config)] == [LEARNERS_TURN, REPLICAS_TURN, "engine"]
    assert [column.kind for column in gpu_memory(config, kinds=["engine"])] == ["engine"]
    other = shared(tmp_path, "rollout.replicas=3", "cluster.share=false")
    assert gpu_memory(config)[2] == gpu_memory(other)[1]


def test_a_larger_gpu_leaves_an_engine_more(tmp_path):
    small, large = (gpu_memory(shared(tmp_path), gpu_bytes=size)[1].fitting for size in (80e9, 141e9))
    assert large == int((0.85 * (141e9 * 0.95 - STATES) - WEIGHTS) / TOKEN) > 2 * small
