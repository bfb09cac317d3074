"""Runs that others published, simulated at their shapes without a fit: seconds a step, and ratios in a series.

`python experiments/published/run.py [FILE]` simulates the runs of FILE, by default of `runs.yaml` beside it, and
prints predicted beside published. Times come from `laminar_lab/step_time.py`, as in `laminar plan`; the schedules
of other systems from `experiments/paper/baselines.py`.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import yaml

from laminar_lab.doctor.gpu_formula import cache_tokens
from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.gpus import gpu_named
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.placements import MOST_CACHED, MOST_RUNNING, STATIC_SHARE
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_py.config import ConfigError, RunConfig, parse_config
from laminar_py.config.learner import LearnerConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from experiments.paper.baselines import Baseline, simulate_baseline

RUNS = Path(__file__).with_name("runs.yaml")
ASKED = 0.2  # largest error of a ratio
STEPS, PER_NODE = 24, 8
MFUS = (0.4, 0.15)  # of the learner: the planner's, and what RL systems show end to end (as in experiments/paper)
NETWORK_BYTES_PER_S = 50e9  # of a GPU to other nodes: a port of 400 Gbit/s


class PublishedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run as its owners describe it; `runs.yaml` explains the fields and has examples."""

    name: str
    model: str
    gpu: str
    train_gpus: int
    generate_gpus: int | None
    tensor_parallel: int
    prompts_per_step: int
    group_size: int
    prompt_tokens: int
    mean_tokens: int  # of a response
    max_tokens: int
    max_staleness: int | None
    weights_s: float
    logprob_passes: int
    published_s: float


class Series(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs that differ in little."""

    series: str
    source: str
    settings: dict[str, object] = {}
    runs: list[dict[str, object]]

    @property
    def published(self) -> list[PublishedRun]:
        """The runs with the settings of the series. Raises `ConfigError`."""
        try:
            return [msgspec.convert(self.settings | run, PublishedRun) for run in self.runs]
        except msgspec.ValidationError as error:
            raise ConfigError(f"series={self.series}: {error}; runs.yaml says what each field means") from None


def lengths_of(run: PublishedRun) -> Lengths:
    """Return log-normal lengths whose mean after the cut is the published mean; p99 is 10 times p50 before it.

    Raises `ConfigError` for a mean that is too near the most tokens.
    """
    low, high = 1.0, float(run.max_tokens)
    while True:
        p50 = (low + high) / 2
        found = Lengths.of_percentiles(p50, None, cap=run.max_tokens, prompt=run.prompt_tokens)
        if high - low < 0.5:
            break
        low, high = (p50, high) if found.mean < run.mean_tokens else (low, p50)
    if abs(found.mean / run.mean_tokens - 1) > 0.01:
        raise ConfigError(
            f"mean_tokens={run.mean_tokens}: with max_tokens={run.max_tokens} lengths have a mean of"
            f" {found.mean:.0f} at most; check both"
        )
    return found


def times_of(run: PublishedRun, request: PlanRequest) -> EmulationProfile:
    """Return the times of an engine, and of a learner that is one device as fast as all its GPUs.

    Model and pipeline parallelism divide a batch without loss, as in `experiments/paper`. The sync of weights is
    the baseline's.
    """
    profile = request.profile(run.tensor_parallel)
    passes = 1 + run.logprob_passes / 3  # over the cost of forward and backward
    speed = profile.learner.train_tokens_per_s * run.train_gpus / passes
    learner = profile.learner.model_copy(update={"train_tokens_per_s": speed, "publish_s": 0.0})
    return EmulationProfile(engine=profile.engine, learner=learner)


def config_of(run: PublishedRun, request: PlanRequest) -> RunConfig:
    """Return the run's config with emulated engines."""
    lengths, room = request.lengths, STATIC_SHARE * request.fleet.gpu.memory_bytes
    replicas = (run.generate_gpus or run.train_gpus) // run.tensor_parallel
    cache = cache_tokens(request.shape, gpus=run.tensor_parallel, static_bytes=room)
    ahead = 1 + (run.max_staleness or 0)
    return parse_config(
        {
            "name": "published",
            "steps": STEPS,
            "model": {"path": "model", "from_scratch": True},
            "data": {"train": "train.jsonl"},
            "reward": {"use": ["math"]},
            "rollout": {
                "engine": request.emulated_engine(learner_devices=1),
                "replicas": replicas,
                "max_batch": MOST_RUNNING,
                "max_len": lengths.most,
                "kv_capacity": min(cache, MOST_CACHED),
                "batch_per_replica": -(-ahead * run.prompts_per_step // replicas) * run.group_size,
                "prompts_per_step": run.prompts_per_step,
                "group_size": run.group_size,
                "without_signal": "train",
                "sampling": {"max_new_tokens": lengths.cap},
            },
            "packer": {"max_tokens": lengths.most},
        }
    )


def predict(run: PublishedRun, mfu: float) -> float:
    """Simulate a run; return its seconds a step. Raises `ConfigError`."""
    gpu, gpus = gpu_named(run.gpu), run.train_gpus + (run.generate_gpus or 0)
    if run.tensor_parallel > PER_NODE:
        gpu = replace(gpu, link_bytes_per_s=min(gpu.link_bytes_per_s, NETWORK_BYTES_PER_S))
    name, shape = model_named(run.model)
    request = PlanRequest(
        model=name,
        shape=shape,
        fleet=GpuFleet(gpu=gpu, nodes=-(-gpus // PER_NODE), per_node=PER_NODE),
        lengths=lengths_of(run),
        prompts_per_step=run.prompts_per_step,
        group_size=run.group_size,
        learner=LearnerConfig(),
        mfu=mfu,
    )
    return simulate_baseline(
        config_of(run, request),
        Baseline.SYNC if run.generate_gpus is None else Baseline.PARTIAL,
        profile=times_of(run, request),
        sync_s=run.weights_s,
        max_staleness=run.max_staleness,
    ).figures.step_s


def main() -> None:
    """Simulate the runs of a file and print predicted beside published."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RUNS)
    every = msgspec.convert(yaml.safe_load(parser.parse_args().file.read_text()), list[Series])
    shares = [f"at {mfu:.0%}" for mfu in MFUS]
    print(f"| run | published s | {' | '.join(shares)} | ratio | {' | '.join(f'{at}, error' for at in shares)} |")
    print("|---|---" + "|---" * (1 + 2 * len(MFUS)) + "|")
    errors: list[list[float]] = [[] for _ in MFUS]
    for series in every:
        print(f"| **{series.series}** |" + " |" * (2 + 2 * len(MFUS)))
        first: list[float] = []
        for run in series.published:
            told = [run.published_s, *(predict(run, mfu) for mfu in MFUS)]
            first = first or told
            ratio, *found = [seconds / base for seconds, base in zip(told, first, strict=True)]
            cells = [f"{one:.2f}, {one / ratio - 1:+.0%}" for one in found]
            if told is not first:
                for error, one in zip(errors, found, strict=True):
                    error.append(one / ratio - 1)
            seconds = " | ".join(f"{one:.1f}" for one in told)
            print(f"| {run.name} | {seconds} | {ratio:.2f} | {' | '.join(cells)} |", flush=True)
    for mfu, found in zip(MFUS, errors, strict=True):
        within = sum(abs(error) <= ASKED for error in found)
        print(f"\nMFU {mfu:.0%}: {within} of {len(found)} ratios within {ASKED:.0%}")


if __name__ == "__main__":
    main()
