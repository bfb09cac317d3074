"""The model of step time: rates against published tables, its agreement with the emulated parts, and the fit."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_lab.doctor.gpu_formula import cache_tokens
from laminar_lab.emulation.settings import read_profile
from laminar_lab.gpus import gpu_named
from laminar_lab.plan.known_models import KNOWN_MODELS, model_named
from laminar_lab.step_time import (
    LEARNER_MFU,
    PUBLISH_BYTES_PER_S,
    RankTraffic,
    TimedShape,
    decode_step_s,
    decode_terms,
    engine_times,
    fit,
    learner_step_s,
    learner_times,
    rank_traffic,
    token_cost,
    version_bytes,
    with_passes,
)
from laminar_py.config.learner import LearnerConfig, LoraConfig, ReduceDtype
from laminar_py.learner.packing import RowSize
from tests.plan.builders import make_request
from tests.runs.runs import REPO

TABLE = [("7B", 1, 927_000), ("32B", 2, 272_000), ("32B", 4, 794_000), ("72B", 4, 391_000), ("72B", 8, 1_230_000)]


@pytest.mark.parametrize(("size", "gpus", "room"), TABLE)
def test_rules_meet_published_decode_steps_within_seven_percent(size, gpus, room):
    _, shape = model_named(size)
    ruled = engine_times(shape, gpu_named("H100"), tensor_parallel=gpus)
    table = read_profile(Path(REPO / f"configs/emulation/h100_{size.lower()}_tp{gpus}.yaml")).engine
    for running in (1, 16, 64):
        for context in (500, 4000):
            kv = running * context
            expected = table.seconds(1, running=running, kv_used=kv)
            assert ruled.seconds(1, running=running, kv_used=kv) == pytest.approx(expected, rel=0.07)
    assert ruled.prefill_tokens_per_s == pytest.approx(table.prefill_tokens_per_s, rel=0.12)
    assert cache_tokens(shape, gpus=gpus, static_bytes=0.85 * 80e9) == pytest.approx(room, rel=0.02)


@pytest.mark.parametrize(("size", "gigabytes"), [("70B", 140), ("405B", 810)])
def test_weights_of_known_models_have_their_known_size(size, gigabytes):
    assert version_bytes(model_named(size)[1].total) == pytest.approx(1e9 * gigabytes, rel=0.01)


def test_a_size_stands_for_the_nearest_dense_model_and_an_odd_one_is_refused():
    assert model_named("7B")[0] == "Qwen2.5-7B"
    assert model_named("30b")[0] == "Qwen2.5-32B"
    with pytest.raises(ValueError, match="model=20B: no folder, and no model that is known"):
        model_named("20B")


def test_a_mixture_computes_with_its_chosen_experts_alone():
    mixture = KNOWN_MODELS["Qwen3-30B-A3B"]
    assert mixture.total == pytest.approx(30.5e9, rel=0.01)
    assert mixture.active == pytest.approx(3.0e9, rel=0.05)


def test_twice_the_bandwidth_halves_what_reading_takes_and_not_the_kernels():
    _, shape = model_named("7B")
    h100, h200 = (engine_times(shape, gpu_named(name), tensor_parallel=1) for name in ("H100", "H200"))
    assert h200.kv_token_s / h100.kv_token_s == pytest.approx(3.35 / 4.8)
    assert 3.35 / 4.8 < h200.step_s / h100.step_s < 0.8


def test_the_learner_takes_six_flops_a_parameter_and_token():
    _, shape = model_named("7B")
    rate = learner_times(shape, gpu_named("H100"), mfu=0.4).train_tokens_per_s
    assert rate == pytest.approx(0.4 * 989e12 / (6 * shape.active))


def test_adapters_leave_attention_its_cost_and_load_as_their_own_bytes():
    _, shape = model_named("7B")
    gpu, adapters = gpu_named("H100"), shape.adapters(LoraConfig(rank=32))
    whole, frozen = (learner_times(shape, gpu, adapters=number) for number in (0, adapters))
    assert frozen.attention_share == pytest.approx(1.5 * whole.attention_share)
    for times, flops in ((whole, 6), (frozen, 4)):  # of a token pair's attention: 6 a layer and hidden value
        pair_s = times.attention_share / times.train_tokens_per_s
        attention = 6 * shape.num_hidden_layers * shape.hidden_size
        assert pair_s * times.train_tokens_per_s * flops * shape.active == pytest.approx(attention)
    loads = [engine_times(shape, gpu, tensor_parallel=1, adapters=number).load_s for number in (0, adapters)]
    assert loads[1] / loads[0] == pytest.approx(adapters / shape.total)


def test_a_reference_and_several_updates_cost_their_passes():
    _, shape = model_named("7B")
    once = learner_times(shape, gpu_named("H100"))
    same = with_passes(once, updates=1, reference=False, proximal=True)
    assert same == once
    more = with_passes(once, updates=4, reference=True, proximal=True)
    assert once.train_tokens_per_s / more.train_tokens_per_s == pytest.approx((6 + 2 + 1.5) / 6)
    assert more.optimizer_s == 4 * once.optimizer_s


def test_a_critic_costs_a_pass_and_a_second_models_training():
    plain, valued = make_request().profile(1), make_request(has_critic=True).profile(1)
    assert plain.engine == valued.engine
    assert plain.learner.train_tokens_per_s / valued.learner.train_tokens_per_s == pytest.approx((6 + 2 + 6) / 6)
    assert valued.learner.optimizer_s == 2 * plain.learner.optimizer_s


# ---- one model for planner, simulator and calibration


def test_the_planner_and_the_emulated_engine_take_the_same_time_for_a_decode_step():
    times = read_profile(Path(REPO / "configs/emulation/h100_7b_tp1.yaml")).engine
    expected = times.seconds(1, running=64, kv_used=64 * 4000)
    assert decode_step_s(times, 64, 4000) == pytest.approx(expected)
    coefficients = (times.step_s, times.sequence_s, times.kv_token_s)
    assert np.dot(coefficients, decode_terms(64, 64 * 4000)) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_planner_and_the_emulated_learner_take_the_same_time_for_equal_microbatches(ranks):
    times = read_profile(Path(REPO / "configs/emulation/h100_7b_tp1.yaml")).learner
    lengths = np.array([400.0, 8000.0, 1600.0])
    size = RowSize(10_000, float((lengths**2).sum()))
    seconds = learner_step_s(times, tokens=6 * 10_000, cost=token_cost(times, size), microbatches=6, ranks=ranks)
    assert seconds == pytest.approx(times.step_s([size] * 6, devices=ranks))


def test_a_mixture_publishes_all_its_parameters_and_computes_with_the_active_ones():
    shape, gpu = KNOWN_MODELS["Qwen3-30B-A3B"], gpu_named("H100")
    times = learner_times(shape, gpu)
    assert (times.num_published, times.num_active) == (shape.total, shape.active)
    assert times.train_tokens_per_s == pytest.approx(LEARNER_MFU * gpu.bf16_flops / (6 * shape.active))
    assert times.attention_share == pytest.approx(shape.num_hidden_layers * shape.hidden_size / shape.active)
    assert times.publish_s == pytest.approx(2 * shape.total / PUBLISH_BYTES_PER_S)


def traffic(world_size, shard_ranks=None, *, network=50e9, **settings):
    learner = LearnerConfig(world_size=world_size, shard_ranks=shard_ranks, **settings)
    _, shape = model_named("32B")
    h100 = gpu_named("H100")
    return shape.total, rank_traffic(shape, h100, learner, tokens=0, per_node=8, network_bytes_per_s=network)


def test_a_rank_gathers_weights_twice_and_sums_gradients_once_over_the_slowest_link():
    total, on_node = traffic(8)
    assert on_node.round_s == pytest.approx(8 * total * 7 / 8 / (2 / 3 * 450e9))
    assert on_node.copies_s == 0
    _, across = traffic(16)
    assert across.round_s == pytest.approx(8 * total * 15 / 16 / 50e9)
    assert traffic(16, reduce_dtype=ReduceDtype.BFLOAT16)[1].round_s == pytest.approx(across.round_s * 6 / 8)


def test_groups_of_a_node_gather_as_one_node_does_and_send_only_gradients_over_the_network():
    total, groups = traffic(32, 8)
    assert groups.round_s == traffic(8)[1].round_s
    of_node = 2 * 3 / 4 * 4 * total  # its eight ranks each send an eighth
    assert groups.copies_s == pytest.approx(of_node / 50e9)


def test_traffic_takes_time_where_computation_does_not_hide_it():
    times = read_profile(Path(REPO / "configs/emulation/h100_7b_tp1.yaml")).learner
    step = {"tokens": 8e4, "cost": 1.0, "microbatches": 8, "ranks": 4}
    alone = learner_step_s(times, **step)
    round_s = (alone - times.optimizer_s) / 2
    hidden = learner_step_s(times, **step, traffic=RankTraffic(round_s / 2, round_s / 3))
    assert hidden == pytest.approx(alone)
    bare = learner_step_s(times, **step, traffic=RankTraffic(2 * round_s, round_s))
    assert bare == pytest.approx(times.optimizer_s + 5 * round_s)


# ---- the fit


SHAPES = [(1, n, n * length) for n in (1, 8, 64) for length in (10, 400, 3000)]
Share = st.floats(1e-6, 1.0) | st.just(0.0)


def observed(coefficients, shapes=SHAPES):
    times = [sum(c * t for c, t in zip(coefficients, terms, strict=True)) for terms in shapes]
    return [TimedShape(str(terms), terms, seconds) for terms, seconds in zip(shapes, times, strict=True)]


@given(st.floats(1e-3, 1.0), Share, Share)
def test_times_without_noise_give_back_their_coefficients(first, second, third):
    coefficients = (first, second * 1e-3, third * 1e-6)
    found = fit(observed(coefficients))
    assert found.coefficients == pytest.approx(coefficients, rel=1e-5, abs=1e-9)
    assert found.worst_error < 1e-6


@given(st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9))
def test_no_coefficient_is_negative_and_no_term_alone_fits_better(noise):
    exact = observed((0.02, 3e-5, 8e-8))
    noisy = [TimedShape(o.name, o.terms, o.seconds * factor) for o, factor in zip(exact, noise, strict=True)]
    found = fit(noisy)
    assert min(found.coefficients) >= 0
    lost = sum(error**2 for error in found.errors)
    for place in range(3):
        alone = fit([TimedShape(o.name, (o.terms[place],), o.seconds) for o in noisy])
        assert lost <= sum(error**2 for error in alone.errors) + 1e-9


def test_a_time_that_falls_with_a_term_leaves_the_term_out():
    falling = [TimedShape(str(n), (1, n), 1.0 - n / 100) for n in (1, 2, 3)]
    assert fit(falling).coefficients[1] == 0
