"""Published runs: every run of the file is understood, lengths have the published mean, bad files are one line."""

import sys

import msgspec
import pytest
import yaml

from experiments.paper import baselines
from laminar_py.config import ConfigError

sys.modules.setdefault("baselines", baselines)

from experiments.published import run as published  # noqa: E402
from experiments.published.run import PublishedRun, Series, lengths_of, predict  # noqa: E402

SERIES = msgspec.convert(yaml.safe_load(published.RUNS.read_text()), list[Series])
RUNS = [run for series in SERIES for run in series.published]
SMALL = PublishedRun(
    name="small",
    model="Qwen2.5-7B",
    gpu="H100",
    train_gpus=4,
    generate_gpus=4,
    tensor_parallel=1,
    prompts_per_step=4,
    group_size=4,
    prompt_tokens=100,
    mean_tokens=500,
    max_tokens=2000,
    max_staleness=1,
    weights_s=1.0,
    logprob_passes=0,
    published_s=10.0,
)


def test_lengths_have_the_published_mean_and_cut():
    assert len(RUNS) == 15
    for run in RUNS:
        lengths = lengths_of(run)
        assert lengths.mean == pytest.approx(run.mean_tokens, rel=0.01)
        assert lengths.quantiles.max() == run.max_tokens


def test_a_run_that_may_be_stale_is_faster_and_a_sync_of_weights_costs_its_time(monkeypatch):
    monkeypatch.setattr(published, "STEPS", 8)
    change = msgspec.structs.replace
    fast = predict(SMALL, 0.4)
    on_policy = predict(change(SMALL, max_staleness=0), 0.4)
    assert fast < on_policy
    assert predict(change(SMALL, max_staleness=0, weights_s=11.0), 0.4) == pytest.approx(on_policy + 10, abs=0.5)
    assert predict(change(SMALL, train_gpus=4, generate_gpus=None, max_staleness=None), 0.4) > fast


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"weights": 1.0}, "series=one: Object contains unknown field `weights`"),
        ({"gpu": 3}, "series=one: Expected `str`, got `int` - at `$.gpu`"),
    ],
)
def test_a_bad_run_is_one_line(change, line):
    series = Series(series="one", source="", settings=msgspec.to_builtins(SMALL), runs=[change])
    with pytest.raises(ConfigError) as error:
        _ = series.published
    assert str(error.value).startswith(line)


def test_a_mean_too_near_the_limit_is_one_line():
    with pytest.raises(ConfigError, match="mean_tokens=1900: with max_tokens=2000 lengths have a mean of"):
        lengths_of(msgspec.structs.replace(SMALL, mean_tokens=1900))
