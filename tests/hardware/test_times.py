"""Times by scaling rules, against the published tables that profiles were made of, and known sizes of models."""

from pathlib import Path

import pytest

from laminar_lab.plan.known_models import KNOWN_MODELS, model_named
from laminar_lab.plan.times import engine_times, kv_tokens, learner_times, weights_bytes
from laminar_py.config.loading import read_profile
from laminar_py.runtime.preflight.gpus import gpu_named
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
            expected = table.steps.seconds(1, running=running, kv_used=kv)
            assert ruled.steps.seconds(1, running=running, kv_used=kv) == pytest.approx(expected, rel=0.07)
    assert ruled.prefill_tokens_per_s == pytest.approx(table.prefill_tokens_per_s, rel=0.12)
    assert kv_tokens(shape, gpu_named("H100"), tensor_parallel=gpus, static_share=0.85) == pytest.approx(
        room, rel=0.02
    )


@pytest.mark.parametrize(("size", "gigabytes"), [("70B", 140), ("405B", 810)])
def test_weights_of_known_models_have_their_known_size(size, gigabytes):
    assert weights_bytes(model_named(size)[1]) == pytest.approx(1e9 * gigabytes, rel=0.01)


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
