"""Inputs of a plan, read from the user's files: the model or config, the fleet, and the lengths of an earlier run.

Called by `laminar plan`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from laminar_lab.gpus import read_group
from laminar_lab.model_shape import ModelShape
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.request import GpuFleet, Lengths
from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.trajectories import Trajectories
from laminar_py.config import ConfigError, parse_config
from laminar_py.config.cluster import Device
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.loading import read_tree
from laminar_py.config.rollout import Schedule
from laminar_py.records.trajectory import Kind

CONFIGS = (".yaml", ".yml")
MAX_STALENESS = 4  # learner steps, if the config sets none
FEWEST = 20  # responses of a run that lengths need


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model of a plan, e.g. `Subject(name="Qwen2.5-7B", shape=shape, folder=Path("models/Qwen2.5-7B"))`.

    The other fields are from the named config, or have defaults if the user named a model.
    """

    name: str
    shape: ModelShape
    folder: Path  # of the model, in the written config
    tree: dict[str, object] | None = None  # of the named config
    cap: int = 16_384  # tokens of the longest response
    prompts_per_step: int = 128
    group_size: int = 16
    max_staleness: int | None = MAX_STALENESS
    learner: LearnerConfig = field(default_factory=LearnerConfig)  # a plan changes its ranks
    shares: bool = True  # samples share their prompt in the learner
    has_critic: bool = False
    replay_share: float = 0.0


def read_subject(model: str) -> Subject:
    """Read a model folder, `config.json`, a name or size such as `7B`, or a run's YAML. Raises `ConfigError`."""
    path = Path(model)
    if path.suffix not in CONFIGS:
        name, shape = model_named(model)
        folder = path if path.is_dir() else path.parent if path.is_file() else Path("models") / name
        return Subject(name=name, shape=shape, folder=folder)
    tree = read_tree(path, [])
    config = parse_config(tree)
    if config.rollout.engine.emulates is not None:
        raise ConfigError(f"model={model}: its engines emulate the model; name a config whose engines compute")
    own = config.rollout.replicas - config.shared_replicas  # with GPUs that the learner does not use
    others = config.gpus - config.learner.world_size - own * config.rollout.engine.gpus
    if config.learner_device is Device.CUDA and others > 0:
        raise ConfigError(
            f"model={model}: a plan cannot place the {others} GPUs of its frozen models and reward servers;"
            " name a copy of the config without them, and give --gpus without these GPUs"
        )
    name, shape = model_named(str(config.model.path))
    is_async = config.schedule is Schedule.ASYNC  # only then does the config bound the age of data
    return Subject(
        name=name,
        shape=shape,
        folder=config.model.path,
        tree=tree,
        cap=config.rollout.sampling.max_new_tokens,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
        max_staleness=config.staleness.max_staleness if is_async else MAX_STALENESS,
        learner=config.learner,
        shares=config.rollout.shares_prompts,
        has_critic=config.algorithm.critic is not None,
        replay_share=config.buffer.replay.share,
    )


def read_fleet(text: str | None, *, network_bytes_per_s: float) -> GpuFleet:
    """Parse nodes x GPUs per node x kind, e.g. `8x8xH100`. Raises `ConfigError`."""
    if text is None:
        raise ConfigError(
            "--gpus: missing; name the fleet, e.g. --gpus 1x8xH100; for the cores of this machine `laminar init`"
            " writes a config that fits"
        )
    group = read_group(text, option="--gpus")
    if group.gpu is None:
        raise ConfigError(f"--gpus={text}: names no GPU; write e.g. 3x8xH100")
    return GpuFleet(gpu=group.gpu, nodes=group.nodes, per_node=group.each, network_bytes_per_s=network_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLengths:
    """Response lengths of one task in a run, e.g. 4,000 of "math" with p50 812 and p99 7,400 tokens."""

    task: str
    count: int
    p50: float
    p99: float
    prompt_share: float  # variance of log lengths between prompts, over their whole variance


def lengths_by_task(run: Path) -> list[TaskLengths]:
    """Measure the lengths of a run's finished training responses: of all, then by task. Raises `ConfigError`."""
    trained = read_snapshot(run).trajectories
    trained = trained.where(trained.is_kind(Kind.TRAIN) & (trained.finish >= 0))
    if len(trained) < FEWEST:
        raise ConfigError(
            f"--run={run}: {len(trained)} responses have finished, and lengths need {FEWEST}; name another run"
        )
    found = [_measure("all", trained)]
    if len(trained.tasks) > 1:
        by_task = [(task, trained.where(trained.task == place)) for place, task in enumerate(trained.tasks)]
        found += [_measure(task, of_task) for task, of_task in by_task if len(of_task)]
    return found


def _measure(task: str, trained: Trajectories) -> TaskLengths:
    p50, p99 = np.percentile(np.maximum(trained.length, 1), [50, 99])
    share = prompt_share(trained.length, trained.group)
    return TaskLengths(task=task, count=len(trained), p50=float(p50), p99=float(p99), prompt_share=share)


def lengths_of_run(measured: TaskLengths, *, cap: int, prompt: int) -> Lengths:
    """Make log-normal lengths with the percentiles of a run."""
    return Lengths.of_percentiles(
        measured.p50, measured.p99, cap=cap, prompt=prompt, prompt_share=measured.prompt_share
    )


def prompt_share(lengths: npt.NDArray[np.number], groups: npt.NDArray[np.integer]) -> float:
    """Return the variance of log lengths [N] between their groups [N], over their whole variance.

    This is the intraclass correlation of a one-way layout; 0 if fewer than two groups have several responses.
    """
    logs = np.log(np.maximum(lengths, 1))
    _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    several = sizes > 1
    num_groups, num_values = int(several.sum()), int(sizes[several].sum())
    if num_groups < 2:
        return 0.0
    means = np.bincount(place, weights=logs)[several] / sizes[several]
    squares = np.bincount(place, weights=logs**2)[several] - sizes[several] * means**2
    within = float(squares.sum()) / (num_values - num_groups)
    between = float(means.var(ddof=1)) - within * float((1.0 / sizes[several]).mean())
    whole = between + within
    return min(1.0, max(0.0, between / whole)) if whole > 0 else 0.0
