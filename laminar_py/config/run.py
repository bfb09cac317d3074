"""Every setting of a run, checked before anything starts. Owns defaults, bounds and their explanation.

`docs/config.md` is generated from the docstring under each field. Functions elsewhere take the values they
use, never the whole config. Paths in a config file are relative to the working directory.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.algorithm import AlgorithmConfig, Objective
from laminar_py.config.cluster import ClusterConfig, Device
from laminar_py.config.data import DataConfig
from laminar_py.config.emulation import EmulationConfig
from laminar_py.config.engine import EngineKind
from laminar_py.config.evaluation import EvalConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.lora import LoraTarget
from laminar_py.config.model import ModelConfig, WarmStartConfig
from laminar_py.config.packer import PackerConfig
from laminar_py.config.relay import RelayConfig
from laminar_py.config.repack import RepackConfig, RepackPlanner
from laminar_py.config.reward import RewardConfig
from laminar_py.config.rollout import OnNewWeights, RolloutConfig, WithoutSignal
from laminar_py.config.section import Count, Seconds, Section
from laminar_py.config.staleness import BufferConfig, Schedule, StalenessConfig
from laminar_py.config.supervisor import SupervisorConfig
from laminar_py.config.tracking import TrackingConfig
from laminar_py.records.recordings import Recording


class RunConfig(Section):
    """A run of `laminar train`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Runs go to `runs/<name>-<n>`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seeds prompt order, sampling and initialisation."""
    steps: Count
    """Learner steps of the RL phase."""
    max_rl_seconds: Seconds | None = None
    """End the RL phase after this many seconds, if `steps` are not done before."""
    schedule: Schedule = Schedule.ASYNC
    """`async`: no barrier anywhere. `one_step`: a batch is generated while the one before trains. `sync`:
    generation and training take turns."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    model: ModelConfig
    """The model."""
    warm_start: WarmStartConfig | None = None
    """Supervised phase before RL, or none."""
    data: DataConfig
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Replicas and generation."""
    staleness: StalenessConfig = StalenessConfig()
    """Bound on the age of data."""
    buffer: BufferConfig = BufferConfig()
    """Depth between generation and learner."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    repack: RepackConfig = RepackConfig()
    """Consolidation in flight."""
    packer: PackerConfig = PackerConfig()
    """Microbatches."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The loss."""
    learner: LearnerConfig = LearnerConfig()
    """Optimisation."""
    relay: RelayConfig = RelayConfig()
    """Weight distribution."""
    cluster: ClusterConfig = ClusterConfig()
    """Where all of it runs."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics elsewhere."""
    supervisor: SupervisorConfig = SupervisorConfig()
    """Revival of dead parts."""
    emulation: EmulationConfig | None = None
    """Times instead of computation, or none."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        sampling, max_len = self.rollout.sampling, self.rollout.max_len
        cut, recorded = sampling.cuts_vocabulary, Recording.SAMPLING_MASK in self.rollout.record
        if cut and not recorded:
            raise ValueError(
                f"rollout.sampling.top_k={sampling.top_k} top_p={sampling.top_p} min_p={sampling.min_p} cut the"
                " vocabulary, which the learner must know; add sampling_mask to rollout.record"
            )
        if recorded and not cut:
            raise ValueError(
                "rollout.record=sampling_mask would name the whole vocabulary for each token; leave it out, or set"
                " rollout.sampling.top_k, top_p or min_p"
            )
        if cut and not sampling.top_k and self.rollout.engine.kind is EngineKind.SGLANG:
            raise ValueError(
                f"rollout.sampling.top_k=0 top_p={sampling.top_p} min_p={sampling.min_p}: SGLang records sampling"
                " masks of bounded size alone; set top_k"
            )
        if sampling.temperature == 0:
            raise ValueError("rollout.sampling.temperature=0 gives equal samples and no signal; set it above 0")
        if sampling.max_new_tokens >= max_len:
            raise ValueError(
                f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in"
                f" rollout.max_len={max_len}; raise max_len or lower max_new_tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        rollout, engine = self.rollout, self.rollout.engine
        if Recording.ROUTED_EXPERTS in rollout.record and self.emulation is not None:
            raise ValueError("rollout.record=routed_experts: emulated engines have no experts; leave it out")
        if engine.urls and len(engine.urls) != rollout.replicas:
            raise ValueError(
                f"rollout.engine.urls has {len(engine.urls)} servers for rollout.replicas={rollout.replicas}; name"
                " one for each"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        rollout, size = self.rollout, self.rollout.group_size
        if size < 2:
            raise ValueError("rollout.group_size=1 has no advantage within the group; set at least 2")
        if rollout.min_group_survivors > size:
            raise ValueError(
                f"rollout.min_group_survivors={rollout.min_group_survivors} exceeds"
                f" rollout.group_size={size}; lower it"
            )
        for name, value in (("batch_per_replica", rollout.batch_per_replica), ("max_batch", rollout.max_batch)):
            if value < size:
                raise ValueError(
                    f"rollout.{name}={value} is below rollout.group_size={size}, and a group goes to one replica;"
                    " raise it"
                )
        return self

    @model_validator(mode="after")
    def _check_overlong(self) -> Self:
        tokens, cap = self.algorithm.overlong_tokens, self.rollout.sampling.max_new_tokens
        if tokens is not None and tokens > cap:
            raise ValueError(
                f"algorithm.overlong_tokens={tokens} is more than rollout.sampling.max_new_tokens={cap}; lower it"
            )
        return self

    @model_validator(mode="after")
    def _check_capacity(self) -> Self:
        max_len = self.rollout.max_len
        if max_len > self.packer.max_tokens:
            raise ValueError(
                f"packer.max_tokens={self.packer.max_tokens} is below rollout.max_len={max_len}, so a long"
                " trajectory fits no microbatch; raise packer.max_tokens"
            )
        if self.kv_capacity < max_len:
            raise ValueError(
                f"rollout.kv_capacity={self.kv_capacity} cannot hold one trajectory of rollout.max_len={max_len};"
                " raise it"
            )
        if self.capacity < self.trajectories_per_step:
            raise ValueError(
                f"buffer.capacity={self.capacity} is below one learner step of {self.trajectories_per_step}"
                " trajectories (rollout.prompts_per_step * rollout.group_size); raise it"
            )
        return self

    @model_validator(mode="after")
    def _check_learning(self) -> Self:
        algorithm = self.algorithm
        random_start = self.model.from_scratch and self.warm_start is None
        if algorithm.refers and algorithm.reference is None and random_start:
            raise ValueError(
                f"algorithm.name={algorithm.name} kl_coef={algorithm.kl_coef}: the policy is compared with its"
                " start, which model.from_scratch draws at random; name algorithm.reference"
            )
        self._check_teaching()
        self._check_lora()
        if self.schedule is Schedule.ONE_STEP and self.staleness.enforced == 0:
            raise ValueError(
                "staleness.max_staleness=0 is what schedule=one_step exceeds at every other step; set it to 1 or"
                " choose schedule=sync"
            )
        return self

    def _check_lora(self) -> None:
        if self.learner.lora is None:
            return
        if self.model.from_scratch and self.warm_start is None:
            raise ValueError(
                "model.from_scratch=true: with learner.lora only adapters are published, and engines would have no"
                " base; name a folder with weights, or a warm_start"
            )
        if self.emulation is not None:
            raise ValueError("learner.lora: an emulated learner has no weights to adapt; leave learner.lora out")
        if self.rollout.engine.kind is EngineKind.SGLANG:
            self._check_lora_of_servers(self.learner.lora.targets)

    def _check_lora_of_servers(self, targets: Collection[LoraTarget]) -> None:
        rollout = self.rollout
        if self.warm_start is not None:
            raise ValueError(
                f"warm_start.data={self.warm_start.data}: with learner.lora SGLang servers begin with model.path"
                " as it is; name a folder that is warm already and leave warm_start out"
            )
        if rollout.engine.urls:
            raise ValueError(
                f"rollout.engine.urls={','.join(rollout.engine.urls)}: servers that run already have a base of"
                " their own; leave urls out or learner.lora"
            )
        if rollout.on_new_weights in (OnNewWeights.RETRACT, OnNewWeights.IN_PLACE):
            raise ValueError(
                f"rollout.on_new_weights={rollout.on_new_weights}: a request on SGLang keeps the adapter that it"
                " began with; set it to drain or resume"
            )
        attention = {LoraTarget.Q_PROJ, LoraTarget.K_PROJ, LoraTarget.V_PROJ} & set(targets)
        lone_up = LoraTarget.UP_PROJ in targets and LoraTarget.GATE_PROJ not in targets
        if (attention and not attention >= {LoraTarget.Q_PROJ, LoraTarget.V_PROJ}) or lone_up:
            raise ValueError(
                f"learner.lora.targets={','.join(targets)}: SGLang has q_proj, k_proj and v_proj in one matrix and"
                " gate_proj and up_proj in another; name q_proj and v_proj together, k_proj only with both, and"
                " up_proj only with gate_proj"
            )

    def _check_teaching(self) -> None:
        algorithm, rollout = self.algorithm, self.rollout
        equal = algorithm.teacher_coef > 0 or algorithm.objective is Objective.BALANCE  # rewards teach too
        if equal and rollout.without_signal is not WithoutSignal.TRAIN:
            raise ValueError(
                f"rollout.without_signal={rollout.without_signal} drops groups whose rewards are equal, which"
                f" algorithm.name={algorithm.name} learns from; set it to train"
            )
        if algorithm.teacher_coef > 0 and ":" not in self.reward.function:
            raise ValueError(
                f"reward.function={self.reward.function} gives one score, and"
                f" algorithm.teacher_coef={algorithm.teacher_coef} needs a teacher's log-probability of each"
                " token; name a function of yours"
            )
        if algorithm.teacher_coef > 0 and rollout.sampling.cuts_vocabulary:
            raise ValueError(
                f"algorithm.teacher_coef={algorithm.teacher_coef} compares with a teacher over the whole"
                " vocabulary, which rollout.sampling cuts; leave top_k, top_p and min_p out"
            )

    @model_validator(mode="after")
    def _check_repack(self) -> Self:
        asked = self.repack.planner not in (None, RepackPlanner.NONE)
        if asked and not self.repacks:
            raise ValueError(
                f"repack.planner={self.repack.planner} moves nothing under schedule={self.schedule},"
                f" rollout.on_new_weights={self.rollout.on_new_weights},"
                f" rollout.replicas={self.rollout.replicas}; it needs async, drain and two replicas, or set it to"
                " none"
            )
        return self

    @model_validator(mode="after")
    def _check_emulation(self) -> Self:
        if self.emulation is None:
            return self
        if self.rollout.engine.kind is not EngineKind.LOCAL:
            raise ValueError(
                f"rollout.engine.kind={self.rollout.engine.kind}: emulation replaces the engines; leave it out, or"
                " the section emulation"
            )
        if self.warm_start is not None:
            raise ValueError(
                f"warm_start.data={self.warm_start.data}: an emulated learner has no model to warm up; leave"
                " warm_start out"
            )
        if self.algorithm.refers_in_stage:
            raise ValueError(
                "algorithm.reference_pass=stage: an emulated learner has no reference model; leave it out"
            )
        if self.learner.world_size > 1 or self.cluster.learner_device is Device.CUDA:
            raise ValueError(
                f"learner.world_size={self.learner.world_size}"
                f" cluster.learner_device={self.cluster.learner_device}: an emulated learner is one process"
                " without a GPU; set emulation.learner_devices instead"
            )
        return self

    @property
    def repacks(self) -> bool:
        """Whether trajectories in flight are consolidated.

        Only where a replica that becomes free gets prompts: under other schedules it waits for the whole batch.
        """
        drains = self.rollout.on_new_weights is OnNewWeights.DRAIN and self.schedule is Schedule.ASYNC
        return drains and self.rollout.replicas > 1 and self.repack.planner is not RepackPlanner.NONE

    @property
    def num_evaluations(self) -> int:
        """Evaluations during RL, at most."""
        every = self.eval.every_steps
        return len(self.eval.at_seconds) + (self.steps // every if every else 0)

    @property
    def trajectories_per_step(self) -> int:
        """B * K."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def kv_capacity(self) -> int:
        """Tokens of KV cache in one engine."""
        return self.rollout.kv_capacity or self.rollout.max_batch * self.rollout.max_len

    @property
    def capacity(self) -> int:
        """Live trajectories at most."""
        in_flight = self.rollout.replicas * self.rollout.batch_per_replica
        return self.buffer.capacity or 4 * self.trajectories_per_step + in_flight
