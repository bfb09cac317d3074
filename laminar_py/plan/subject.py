"""The model, or the config of a run, that a plan is asked for, and the lengths of a run that has ended.

Called by `laminar plan`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar_py.analytics.read.snapshot import read_snapshot
from laminar_py.config.cluster import Device
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.loading import parse_config, read_tree
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.config.staleness import Schedule
from laminar_py.hardware.gpus import read_group
from laminar_py.hardware.known_models import model_named
from laminar_py.hardware.model_shape import ModelShape
from laminar_py.plan.request import GpuFleet, Lengths
from laminar_py.records.trajectory import Kind

CONFIGS = (".yaml", ".yml")
FEWEST = 20  # responses that lengths are taken from
CAP, GROUPS, GROUP_SIZE, MAX_STALENESS = 16_384, 128, 16, 4  # where no config says


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model of a plan, e.g. `Subject(name="Qwen2.5-7B", shape=shape, folder=Path("models/Qwen2.5-7B"))`."""

    name: str
    shape: ModelShape
    folder: Path  # of the model, in the config that is written
    tree: dict[str, object] | None = None  # of the config that was named
    config: RunConfig | None = None

    @property
    def cap(self) -> int:
        """Longest response, in tokens."""
        return CAP if self.config is None else self.config.rollout.sampling.max_new_tokens

    @property
    def prompts_per_step(self) -> int:
        """Groups of a step."""
        return GROUPS if self.config is None else self.config.rollout.prompts_per_step

    @property
    def group_size(self) -> int:
        """Samples of a prompt."""
        return GROUP_SIZE if self.config is None else self.config.rollout.group_size

    @property
    def max_staleness(self) -> int | None:
        """Bound on the age of data, in steps; a config of another schedule says nothing of it."""
        if self.config is None or self.config.schedule is not Schedule.ASYNC:
            return MAX_STALENESS
        return self.config.staleness.max_staleness

    @property
    def learner(self) -> LearnerConfig:
        """Settings of the learner, of which a plan changes the ranks."""
        return LearnerConfig() if self.config is None else self.config.learner


def read_subject(model: str) -> Subject:
    """A model's folder, its `config.json`, a name or size such as `7B`, or a run's YAML. Raises `ConfigError`."""
    path = Path(model)
    if path.suffix not in CONFIGS:
        name, shape = model_named(model)
        folder = path if path.is_dir() else path.parent if path.is_file() else Path("models") / name
        return Subject(name=name, shape=shape, folder=folder)
    tree = read_tree(path, [])
    config = parse_config(tree)
    if config.emulation is not None:
        raise ConfigError(f"model={model}: its section emulation replaces the model; name a config without one")
    others = config.gpus - config.learner.world_size - config.rollout.replicas * config.rollout.engine.gpus
    if config.learner_device is Device.CUDA and others > 0:
        raise ConfigError(
            f"model={model}: {others} of its GPUs are of a reference stage or of reward servers, which no plan"
            " places; leave them out of a copy, and give --gpus without theirs"
        )
    name, shape = model_named(str(config.model.path))
    return Subject(name=name, shape=shape, folder=config.model.path, tree=tree, config=config)


def read_fleet(text: str, *, network_bytes_per_s: float) -> GpuFleet:
    """Nodes x GPUs of each x kind, e.g. `8x8xH100`. Raises `ConfigError`."""
    group = read_group(text, option="--gpus")
    if group.gpu is None:
        raise ConfigError(f"--gpus={text}: names no GPU; write e.g. 3x8xH100")
    return GpuFleet(gpu=group.gpu, nodes=group.nodes, per_node=group.each, network_bytes_per_s=network_bytes_per_s)


@dataclass(frozen=True, slots=True)
class TaskLengths:
    """Lengths of the responses of one task in a run, e.g. `TaskLengths("math", 4000, 812, 7400)`."""

    task: str
    count: int
    p50: float
    p99: float


def lengths_by_task(run: Path) -> list[TaskLengths]:
    """Lengths of a run's finished training responses, of all of them first. Raises `ConfigError`."""
    trained = read_snapshot(run).trajectories
    trained = trained.where(trained.is_kind(Kind.TRAIN) & (trained.finish >= 0))
    if len(trained) < FEWEST:
        raise ConfigError(
            f"--run={run}: {len(trained)} responses have finished in it, and lengths need {FEWEST}; name another"
        )
    found = [_measured("all", trained.length)]
    if len(trained.tasks) > 1:
        found += [
            _measured(task, trained.length[trained.task == place])
            for place, task in enumerate(trained.tasks)
            if (trained.task == place).any()
        ]
    return found


def _measured(task: str, lengths: np.ndarray[tuple[int], np.dtype[np.int32]]) -> TaskLengths:
    p50, p99 = np.percentile(lengths, [50, 99])
    return TaskLengths(task, len(lengths), max(1.0, float(p50)), max(1.0, float(p99)))


def lengths_of(measured: TaskLengths, *, cap: int, prompt: int) -> Lengths:
    """Log-normal lengths with the percentiles of a run."""
    return Lengths.of_percentiles(measured.p50, measured.p99, cap=cap, prompt=prompt)
