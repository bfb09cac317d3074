"""The config of a run: all sections, and the checks that concern several of them, before anything starts.

`docs/config.md` is generated from the docstring under each field. Functions elsewhere take the values that they
use, not the whole config. Paths in a config file are relative to the working directory.
"""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.alarms import AlarmsConfig
from laminar_py.config.algorithm import (
    AlgorithmConfig,
    AnyAlgorithmConfig,
    check_overlong,
    check_reference,
    check_teaching,
)
from laminar_py.config.cluster import (
    ClusterConfig,
    Device,
    LeaseCache,
    RelayConfig,
    SandboxConfig,
    SupervisorConfig,
    check_share,
)
from laminar_py.config.data import DataConfig, ModelConfig
from laminar_py.config.engine import BACKENDS
from laminar_py.config.environment import AnyEnvironmentConfig, check_environment
from laminar_py.config.evaluation import EvalConfig, check_evaluation
from laminar_py.config.learner import (
    LearnerConfig,
    PackerConfig,
    check_lora,
    check_microbatches,
    check_rounding,
)
from laminar_py.config.replay import check_replay
from laminar_py.config.reward import RewardConfig, check_sets
from laminar_py.config.rollout import (
    NO_PLANNER,
    BufferConfig,
    RepackConfig,
    RolloutConfig,
    Schedule,
    StalenessConfig,
    can_repack,
    check_buffer,
    check_planner,
    check_rollout,
    check_schedule,
    usual_batch,
)
from laminar_py.config.section import Count, Seconds, Section
from laminar_py.config.tracking import TrackingConfig
from laminar_py.config.warm_start import AnyWarmStartConfig


class RunConfig(Section):
    """A run of `laminar train`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the run; its folder is `runs/<name>-<n>`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of prompt order, sampling and initialisation."""
    steps: Count
    """Learner steps of the RL phase."""
    max_rl_seconds: Seconds | None = None
    """End the RL phase after this many seconds, even before the last of `steps`."""
    schedule: Schedule = Schedule.ASYNC
    """`async`: generation and training run side by side, without barriers. `one_step`: a batch is generated while
    the one before trains. `sync`: generation and training alternate."""
    runs: Path = Path("runs")
    """Folder of all runs. All hosts of a run see it at this path."""
    model: ModelConfig
    """Model that is trained."""
    warm_start: AnyWarmStartConfig | None = None
    """Phase before RL; none: RL begins at once."""
    data: DataConfig
    """Problems to train on."""
    rollout: RolloutConfig = RolloutConfig()
    """Replicas and generation."""
    staleness: StalenessConfig = StalenessConfig()
    """Bound on the age of data."""
    buffer: BufferConfig = BufferConfig()
    """Trajectories between generation and learner."""
    reward: RewardConfig
    """Scoring."""
    sandbox: SandboxConfig = SandboxConfig()
    """Isolation of programs that the model writes."""
    environment: AnyEnvironmentConfig | None = None
    """Environment that answers the turns of the model; none: a response is one turn."""
    repack: RepackConfig = RepackConfig()
    """Repacking of trajectories in flight."""
    packer: PackerConfig = PackerConfig()
    """Microbatches."""
    algorithm: AnyAlgorithmConfig = AlgorithmConfig()
    """The loss."""
    learner: LearnerConfig = LearnerConfig()
    """Optimisation."""
    relay: RelayConfig = RelayConfig()
    """Weight distribution."""
    cluster: ClusterConfig = ClusterConfig()
    """Placement of processes."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    tracking: TrackingConfig = TrackingConfig()
    """Trackers of metrics."""
    supervisor: SupervisorConfig = SupervisorConfig()
    """Restarts of crashed parts."""
    alarms: AlarmsConfig = AlarmsConfig()
    """Reactions to silent failures."""

    @model_validator(mode="after")
    def _fill_in_batch(self) -> Self:
        """Replace the default of `batch_per_replica` where steps replay: it is for a step's new groups.

        Sections are frozen, so the validator that completes one writes past pydantic.
        """
        rollout = self.rollout
        if self.buffer.replay.share and "batch_per_replica" not in rollout.model_fields_set:
            batch = usual_batch(self.fresh_groups, rollout.replicas, rollout.group_size)
            self.__dict__["rollout"] = rollout.model_copy(update={"batch_per_replica": batch})
        return self

    @model_validator(mode="after")
    def _fill_in_correction(self) -> Self:
        """Correct the mismatch of engines that round their weights, unless the section says otherwise."""
        if self.rollout.engine.quantizes:
            self.__dict__["algorithm"] = self.algorithm.corrected()
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check settings of different sections against each other. Raises `ConfigError`."""
        algorithm, rollout = self.algorithm, self.rollout
        random_start = self.model.from_scratch and self.warm_start is None
        check_rollout(rollout, least_group=1 if algorithm.normalises_step else 2)
        check_overlong(algorithm, rollout.sampling)
        check_microbatches(self.packer, self.learner, rollout, staged=bool(algorithm.computing_stages))
        check_buffer(self.capacity, self.new_per_step)
        check_replay(
            self.buffer.replay,
            prompts_per_step=rollout.prompts_per_step,
            stages=algorithm.stages,
            controlled=self.staleness.control is not None,
        )
        check_reference(algorithm, random_start=random_start)
        check_teaching(algorithm, rollout, self.reward)
        check_lora(self.learner.lora, random_start=random_start, quantizes=rollout.engine.quantizes)
        compared = algorithm.has_reference or algorithm.teacher is not None
        check_rounding(self.learner, quantizes=rollout.engine.quantizes, refers=compared)
        check_schedule(self.schedule, self.staleness, publish_every=self.learner.publish_every)
        check_planner(self.repack, self.schedule, rollout)
        check_evaluation(self.eval, rollout)
        if self.cluster.share:
            check_share(
                rollout.engine,
                ranks=self.learner_ranks,
                device=self.learner_device,
                kv_capacity=rollout.kv_capacity,
            )
        check_sets(self.reward, self.eval.sets)
        kinds = {term.kind for term in self.reward.terms}
        check_environment(self.environment, kinds, in_flight=self._in_flight, sandbox=self.sandbox)
        with BACKENDS.naming_package(rollout.engine.kind):
            BACKENDS.get(rollout.engine.kind).check(self)
        return self

    @property
    def has_environment(self) -> bool:
        """True where an environment answers the turns of each trajectory."""
        emulated = self.rollout.engine.emulates
        return self.environment is not None or (emulated is not None and emulated.has_turns)

    @property
    def repacks(self) -> bool:
        """True where trajectories in flight are repacked."""
        return self.repack.planner != NO_PLANNER and can_repack(self.schedule, self.rollout)

    @property
    def learner_device(self) -> Device:
        """Device of the learner's ranks: as configured, else GPUs if the run launches engines on GPUs."""
        engine = self.rollout.engine
        return self.cluster.learner_device or (Device.CUDA if engine.gpus and not engine.hosts else Device.CPU)

    @property
    def shared_replicas(self) -> int:
        """Replicas, from 0 on, that take turns with the learner on its devices (`cluster.share`)."""
        gpus = self.rollout.engine.devices
        if not self.cluster.share:
            return 0
        return min(self.rollout.replicas, self.learner_ranks // gpus) if gpus else self.rollout.replicas

    @property
    def all_shared(self) -> bool:
        """True where every replica takes turns with the learner."""
        return self.cluster.share and self.shared_replicas == self.rollout.replicas

    @property
    def lease_cache(self) -> LeaseCache:
        """Use of the KV cache of shared replicas during the learner's turn."""
        default = LeaseCache.RELEASE if self.rollout.engine.devices else LeaseCache.KEEP
        return self.cluster.lease.cache or default

    @property
    def row_tokens(self) -> int:
        """Most tokens of one microbatch, over all ranks that share it."""
        return self.packer.max_tokens * self.learner.context_parallel

    @property
    def learner_ranks(self) -> int:
        """Ranks of the learner; of an emulated one, the GPUs that share its work."""
        emulated = self.rollout.engine.emulates
        return self.learner.world_size if emulated is None else emulated.learner_devices

    @property
    def gpus(self) -> int:
        """GPUs of the learner, frozen models as stages, engines and reward servers, without attached servers."""
        rollout, launched = self.rollout, (self.reward.servers[pool] for pool, _ in self.reward.launched)
        trained = self.learner.world_size + len(self.algorithm.computing_stages)
        return (
            (trained if self.learner_device is Device.CUDA else 0)
            + (0 if rollout.engine.hosts else (rollout.replicas - self.shared_replicas) * rollout.engine.gpus)
            + sum(server.gpus for server in launched)
        )

    @property
    def num_evaluations(self) -> int:
        """Most times during RL at which one or more sets are evaluated."""
        intervals = set(self.eval.intervals().values())
        return len(self.eval.at_seconds) + sum(self.steps // every for every in intervals)

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories of a learner step: groups times samples of each."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def fresh_groups(self) -> int:
        """Groups of a learner step without replayed ones."""
        groups = self.rollout.prompts_per_step
        return groups - self.buffer.replay.groups_of(groups)

    @property
    def new_per_step(self) -> int:
        """Trajectories of a learner step without replayed ones: as many as replicas generate for it."""
        return self.fresh_groups * self.rollout.group_size

    @property
    def capacity(self) -> int:
        """Most live trajectories: `buffer.capacity`, by default 4 steps and the batches of all replicas.

        With `staleness.control` the default has room for its largest bound.
        """
        control = self.staleness.control
        steps = 4 if control is None else max(4, 1 + control.max)
        return self.buffer.capacity or steps * self.new_per_step + self._in_flight

    @property
    def _in_flight(self) -> int:
        """Most trajectories that all replicas together have at a time."""
        return self.rollout.replicas * self.rollout.batch_per_replica
