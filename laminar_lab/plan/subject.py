"""The model, or the config of a run, that a plan is asked for. Called by `laminar plan`."""

from dataclasses import dataclass
from pathlib import Path

from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.request import GpuFleet
from laminar_py.config import ConfigError, RunConfig, parse_config
from laminar_py.config.cluster import Device
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.loading import read_tree
from laminar_py.config.rollout import Schedule
from laminar_py.runtime.preflight import ModelShape, read_group

CONFIGS = (".yaml", ".yml")
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
