"""Every benchmark in its smallest form: each figure comes, and figures that no load changes hold."""

from pathlib import Path

import pytest
from transformers import Qwen3Config

from laminar_lab.bench import control, endpoint, engine, learner, ledger, publish, refresh, relay, repack, turns
from laminar_lab.bench.learner import draw_step, pack_step, quality
from laminar_lab.bench.turns import added_rows, turn_times
from laminar_lab.bench.workplace import SHARED_MEMORY
from tests.bench.figures import figures

NUM_REPLICAS = 8
TINY = Qwen3Config(
    vocab_size=512,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=32,
    max_position_embeddings=1024,
)


@pytest.mark.slow
def test_every_figure_of_the_control_plane_is_positive():
    found = {row.name: row.value for row in control.rows(replicas=NUM_REPLICAS, rate=8.0, steps=16)}
    assert list(found) == [name.replace("_1024", f"_{NUM_REPLICAS}") for name in control.ROWS]
    assert all(value > 0 for value in found.values())


def test_both_engines_have_a_rate_at_each_concurrency(capsys):
    found = engine.rows(repeats=2, model=TINY, num_requests={1: 1, 4: 4})
    assert [row.name for row in found] == [f"local_over_hf_c{slots}" for slots in (1, 4)]
    assert all(row.value > 0 for row in found)
    assert capsys.readouterr().err.count("\nround ") == 4


def test_changes_of_twenty_versions_leave_a_whole_load_and_take_a_time_beside_it(tmp_path):
    model = Qwen3Config(**TINY.to_diff_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"})
    found = figures(refresh, refresh.rows(repeats=1, model=model, shm=tmp_path))
    assert found.pop("refresh_delta_over_full_local") > 0
    assert set(found.values()) == {None}, "without an environment with SGLang"


@pytest.mark.slow
def test_packed_sequences_have_a_speed_beside_both_paddings_and_shares_are_of_the_whole():
    found = figures(
        learner, learner.rows(repeats=1, sequences=64, seeds=2, model=TINY, rank_tokens=64, prefix_scale=8)
    )
    assert all(value > 0 for value in found.values())
    assert found["fill"] <= 1 >= found["capacity_used"]


def test_a_large_step_is_filled_and_balanced_as_promised():
    found = quality(pack_step(draw_step(0, 2048)), max_tokens=16_384)
    assert found.fill >= 0.995
    assert found.imbalance <= 1.015


@pytest.mark.slow
def test_the_sizes_of_a_record_are_within_bounds():
    found = figures(ledger, ledger.rows(trajectories=6000))
    assert 1 < found["ledger_bytes"] < 5
    assert 0.8 < found["segment_bytes"] < 1.2, "8 bytes a token, and a frame around each piece"


def left() -> set[Path]:
    return set(SHARED_MEMORY.glob("laminar-bench-*"))


@pytest.mark.slow
def test_a_hop_has_a_rate_and_leaves_nothing():
    before = left()
    found = figures(relay, relay.rows(shm=SHARED_MEMORY, repeats=1, num_bytes=2**20))
    assert all(value > 0 for value in found.values())
    assert left() <= before


@pytest.mark.slow
def test_two_ranks_publish_the_digest_of_one_and_leave_nothing():
    before = left()
    found = figures(publish, publish.rows(shm=SHARED_MEMORY, repeats=1, model=TINY))
    assert all(value > 0 for value in found.values())
    assert left() <= before


@pytest.mark.slow
def test_repacking_gains_and_replicas_that_never_drain_gain_more(monkeypatch):
    for name, value in {"REPLICAS": 4, "BATCH": 64, "STEPS": 3}.items():
        monkeypatch.setattr(repack, name, value)
    found = figures(repack, repack.rows(seeds=1))
    assert 1 < found["throughput_repack_over_off"] < found["throughput_full_over_off"]


def test_a_turn_adds_what_the_engine_does_not_take_in_turns_after_the_first():
    times = turn_times([0.0, 1.0, 2.0], [(0.1, 0.5), (1.006, 1.010), (2.012, 2.020)])
    found = figures(turns, added_rows("turn", [times], "here"))
    assert list(found.values()) == pytest.approx([9.0, 15.0, 6.0])


@pytest.mark.slow
def test_a_turn_takes_longer_than_its_engine():
    found = figures(turns, turns.rows(repeats=1, count=1))
    assert 0 < found["turn_engine_ms"] < found["turn_total_ms"]


@pytest.mark.slow
def test_an_agent_waits_longer_for_its_first_event_than_the_engine_takes():
    found = figures(endpoint, endpoint.rows(repeats=1))
    assert 0 < found["endpoint_engine_ms"] < found["endpoint_total_ms"]
