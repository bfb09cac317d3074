"""Every setting of a run, checked before anything starts. Owns defaults, bounds and their explanation.

`docs/config.md` is generated from the docstring under each field. Functions elsewhere take the values they
use, never the whole config. Paths in a config file are relative to the working directory.
"""

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.algorithm import AlgorithmConfig, Objective
from laminar_py.section import Count, Seconds, Section, Share
from laminar_py.types import Record, SamplingParams


class Schedule(StrEnum):
    """When prompts are admitted, relative to learner steps."""

    ASYNC = "async"
    ONE_STEP = "one_step"
    SYNC = "sync"


class OnNewWeights(StrEnum):
    """What a replica does when newer weights exist."""

    DRAIN = "drain"
    RESUME = "resume"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class EngineKind(StrEnum):
    """What generates."""

    LOCAL = "local"
    SGLANG = "sglang"


class Device(StrEnum):
    """What SGLang servers and learner ranks run on."""

    CUDA = "cuda"
    CPU = "cpu"


class StalePolicy(StrEnum):
    """What enforces `max_staleness`."""

    WAIT = "wait"
    DROP = "drop"
    REWEIGHT = "reweight"


class WithoutSignal(StrEnum):
    """What happens to a group whose rewards are all equal."""

    TRAIN = "train"
    SKIP = "skip"
    REFILL = "refill"


class TopologyKind(StrEnum):
    """Shape of the relay tree."""

    STAR = "star"
    CHAIN = "chain"
    KARY = "kary"
    AUTO = "auto"


class Decay(StrEnum):
    """How the learning rate falls after its warm-up."""

    NONE = "none"
    LINEAR = "linear"
    COSINE = "cosine"


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    ALL = "all"


class RepackPlanner(StrEnum):
    """What consolidates trajectories in flight."""

    NONE = "none"
    PAPER = "paper"
    PREDICTIVE = "predictive"


class TrackerKind(StrEnum):
    """Where metrics go besides `metrics.jsonl`; the value is the package."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


class ModelConfig(Section):
    """The model that is trained: a Hugging Face folder."""

    path: Path
    """Folder with `config.json`, `tokenizer.json` and, unless `from_scratch`, safetensors."""
    from_scratch: bool = False
    """Initialise the weights from `seed` instead of loading them; the folder needs no safetensors then."""


class WarmStartConfig(Section):
    """A short supervised phase before RL; its result is cached by the hash of all that it depends on."""

    data: Path
    """JSONL with `prompt` and `response` in each line."""
    steps: Count = 500
    """Optimizer steps."""
    tokens_per_step: Count = 1024
    """Tokens of prompts and responses in one step, at most."""
    lr: Annotated[float, Field(gt=0)] = 4e-3
    """Peak learning rate: linear warm-up over 20 steps, linear decay over the last 40 %."""
    cache: Path = Path(".cache/warm_start")
    """Folder that keeps finished warm starts."""


class DataConfig(Section):
    """Where prompts come from."""

    train: Path
    """JSONL with `prompt` and `answer` in each line, perhaps `id` and `task` too; each epoch is shuffled anew from
    `seed`, and reports tell tasks apart."""
    heldout: Path | None = None
    """JSONL of the same form for evaluation; none of its prompts may occur in `train`."""
    prepare: Path | None = None
    """Python script that makes the files of this run where they are missing; runs before anything else."""


class SamplingConfig(Section):
    """How responses are drawn in training; evaluation is greedy with the same caps."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most probable tokens; 0 keeps all. A cut vocabulary needs `sampling_mask` in `rollout.record`."""
    top_p: Share = 1.0
    """Keep the smallest set of tokens with this probability; 1 keeps all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens at least this times as probable as the most probable one; 0 keeps all."""
    max_new_tokens: Count = 1024
    """Cap on response tokens of a trajectory; a response that reaches it is cut, with an event."""

    def params(self, *, stop_ids: tuple[int, ...] = ()) -> SamplingParams:
        """As an engine is told."""
        return SamplingParams(self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.min_p, stop_ids)

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class EngineConfig(Section):
    """What generates: the embedded engine, or SGLang servers that the run launches or attaches to."""

    kind: EngineKind = EngineKind.LOCAL
    """`local`: the embedded engine, in the replica's process. `sglang`: one SGLang server per replica."""
    urls: tuple[str, ...] = ()
    """Servers that are already running, one per replica, e.g. `[http://10.0.0.5:30000]`; none: launch them. They
    must see `relay.shm` under the same path."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable with the key of the servers in `urls`; launched ones get a key of their own. A server
    beyond loopback is refused without one."""
    python: Path | None = None
    """Interpreter of the environment that has SGLang; default: the run's own."""
    device: Device = Device.CUDA
    """What launched servers run on."""
    tensor_parallel: Count = 1
    """GPUs of one launched server."""
    flags: dict[str, str | int | float | bool | tuple[str | int | float, ...]] = Field(default={})
    """Any other flag of `sglang.launch_server`, without its dashes, e.g. `mem-fraction-static: 0.85`; `true` for
    one that takes no value, a list for one that takes several."""
    start_timeout_s: Seconds = 900.0
    """Longest start of a launched server."""
    stall_timeout_s: Seconds = 60.0
    """A server that has requests and sends no token, or leaves a call unanswered, for so long is lost."""
    stream_interval: Count = 8
    """Tokens in one message of a stream of a launched server: more cost less CPU, fewer tell sooner."""
    verify_every: Annotated[int, Field(ge=0)] = 20
    """The server's own tensors are hashed after its first load and once in so many versions, and must agree among
    replicas that hash the same version; 0: never."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(
                f"rollout.engine.urls={','.join(self.urls)}: a server is named twice, and each replica has its own"
                " weights; name one for each"
            )
        if self.kind is EngineKind.LOCAL and self.urls:
            raise ValueError(
                f"rollout.engine.urls={','.join(self.urls)}: these are SGLang servers; set"
                " rollout.engine.kind=sglang"
            )
        if self.device is Device.CPU and self.tensor_parallel > 1:
            raise ValueError(
                f"rollout.engine.tensor_parallel={self.tensor_parallel} needs GPUs; set"
                " rollout.engine.device=cuda, or tensor_parallel to 1"
            )
        return self


class RolloutConfig(Section):
    """The replicas and what they generate."""

    engine: EngineConfig = EngineConfig()
    """What generates."""
    replicas: Count = 2
    """Inference engines, each with a process of its own."""
    max_batch: Count = 64
    """Trajectories one engine decodes at a time."""
    max_len: Count = 2048
    """Tokens of prompt and response that one trajectory may have in an engine."""
    kv_capacity: Count | None = None
    """KV cache of one engine, in tokens; default `max_batch * max_len`. A full cache retracts the youngest."""
    batch_per_replica: Count = 128
    """Trajectories a draining replica admits under one version before it takes newer weights."""
    on_new_weights: OnNewWeights = OnNewWeights.DRAIN
    """`drain`: finish what was admitted, then load, so a trajectory has one version. `resume`: abort, load,
    continue from the partial response; spans record the mix. `retract`: pause, load, recompute the KV cache, go
    on. `in_place`: pause, load, go on with the KV cache of the old weights; spans record that too."""
    record: tuple[Record, ...] = ()
    """Beside tokens and log-probabilities: `sampling_mask` (the vocabulary each token was drawn from, where it is
    cut), `routed_experts` (of mixture models). The learner replays what is recorded."""
    prompts_per_step: Count = 32
    """Groups in a learner step."""
    group_size: Count = 8
    """Samples of one prompt (K)."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    max_seconds: Seconds | None = None
    """Cap on generation time of a trajectory, in seconds; it is cut there, with an event."""
    without_signal: WithoutSignal = WithoutSignal.SKIP
    """Groups whose rewards are all equal: `train` on them, `skip` them (the step is smaller), or `refill` until
    the step has enough with signal (dynamic sampling)."""
    group_deadline_s: Seconds | None = None
    """Close a group this many seconds after its first member finished; stragglers are dropped with an event."""
    probe_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the trajectories that `group_deadline_s` drops which are generated to their end all the same and
    scored, never trained on, so that the report can say what dropping costs. A draining replica waits for those
    that it has; at most an eighth of all the sequences that the replicas decode at a time go on like this."""
    min_group_survivors: Annotated[int, Field(ge=2)] = 2
    """Members a group needs to be trained on; with fewer it is dropped with an event."""
    partial_interval_s: Seconds = 1.0
    """Seconds between two reports of a running trajectory's new tokens; a crash costs up to twice as much."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.probe_share and self.group_deadline_s is None:
            raise ValueError(
                f"rollout.probe_share={self.probe_share:g}: without rollout.group_deadline_s no deadline drops"
                " anything; set that, or leave probe_share at 0"
            )
        return self


class StalenessConfig(Section):
    """How old a trajectory may be when the learner consumes it, in weight versions."""

    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Bound; None leaves staleness inherent (whatever generation time makes it)."""
    policies: tuple[StalePolicy, ...] = (StalePolicy.WAIT, StalePolicy.DROP)
    """`wait` holds admission so that the bound is rarely met; what exceeds it when it is consumed is dropped
    (`drop`) or has its loss scaled by `(max_staleness + 1) / (staleness + 1)` (`reweight`)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {StalePolicy.DROP, StalePolicy.REWEIGHT} <= set(self.policies):
            raise ValueError("staleness.policies has both drop and reweight; keep one of them")
        if self.max_staleness is not None and not self.policies:
            raise ValueError(
                "staleness.policies is empty although staleness.max_staleness is set; name wait, drop or reweight"
            )
        return self

    @property
    def enforced(self) -> int | None:
        """The bound, where consumption drops or reweights what exceeds it."""
        return self.max_staleness if {StalePolicy.DROP, StalePolicy.REWEIGHT} & set(self.policies) else None


class BufferConfig(Section):
    """Trajectories between generation and learner."""

    capacity: Count | None = None
    """Live trajectories (running, being scored, ready, in the learner) above which no prompt is admitted;
    default 4 learner steps and one batch for each replica."""


class RewardConfig(Section):
    """The scoring stage."""

    function: str = "exact"
    """A registered reward, or `path/to/file.py:function` of your own."""
    pattern: str = r"(.+)"
    """For `exact`: regular expression whose first group is the answer in the response."""
    workers: Count = 1
    """Scoring processes."""
    timeout_s: Seconds = 10.0
    """Longest time for one trajectory; above it is dropped as `reward_timeout`."""


class RepackConfig(Section):
    """Consolidation of trajectories in flight: a replica's last ones move to others of its weight version, so that
    it takes new weights and prompts. Only under `rollout.on_new_weights=drain` and `schedule=async`."""

    planner: RepackPlanner | None = None
    """`paper`: Best-Fit, a source goes whole to one destination. `predictive`: what waits is shared; a source is
    split over several destinations, by predicted remaining tokens and the cost of computing KV caches anew, and
    only where that gains. `none`: nothing moves. Default: `predictive`, where anything can move."""
    interval_s: Seconds = 5.0
    """Seconds between two rounds; there is one after every publish too."""
    max_stall_s: Seconds = 0.7
    """Longest time that one round of `predictive` may cost a destination, for the prefill of what it receives."""
    roofline_batch: Count | None = None
    """Decode batch below which a larger one costs an engine no time: `paper` keeps destinations below it. Default:
    measured, like all that planners know of an engine's speed, on an idle one before the first run, and cached."""


class PackerConfig(Section):
    """How finished trajectories become microbatches."""

    max_tokens: Count = 8192
    """Tokens of one microbatch, at most."""
    look_ahead: Annotated[int, Field(ge=0)] = 0
    """Ready groups beyond those of a step that may be taken in place of older ones, so that a step fills whole
    microbatches on all ranks; 0: staleness order alone. It pays where a step has few microbatches."""
    max_passes: Count = 2
    """Times that `look_ahead` may pass over the same group."""


class LoraTarget(StrEnum):
    """Projections of a layer."""

    Q_PROJ = "q_proj"
    K_PROJ = "k_proj"
    V_PROJ = "v_proj"
    O_PROJ = "o_proj"
    GATE_PROJ = "gate_proj"
    UP_PROJ = "up_proj"
    DOWN_PROJ = "down_proj"


class LoraConfig(Section):
    """Low-rank adapters: they alone are trained, checkpointed and published. Engines get the base from the folder
    that the learner has it from, `model.path` or the warm start's cache, which all hosts see under that path."""

    rank: Count = 16
    """Rows of A and columns of B: the adapted weight is `W + alpha / rank * B A`."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters, times `rank`."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = tuple(LoraTarget)
    """Projections that are adapted in every layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"learner.lora.targets={','.join(self.targets)}: one is named twice; name each once")
        return self


class LearnerConfig(Section):
    """Optimisation."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate of AdamW, after its warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises to `lr`, linearly."""
    decay: Decay = Decay.NONE
    """`linear` or `cosine`: the learning rate falls from there to 0 at the last of `steps`. `none`: it stays."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    world_size: Count = 1
    """Data-parallel ranks (FSDP2), each in a process of its own."""
    recompute: Recompute = Recompute.NONE
    """Activations that the backward pass computes again instead of keeping them, for long microbatches. `all` of a
    layer: a third more work, and memory for one layer instead of all. `selective`: attention and every second
    matrix product are kept; about a sixth more work."""
    compile: bool = False
    """Compile each layer (`torch.compile`): faster on GPUs, after some minutes at the start."""
    offload: bool = False
    """Keep master weights, gradients and optimizer in the memory of the host, and update them there: 16 bytes a
    parameter less on GPUs, and a slower step. Only with a learner on GPUs. An update on several microbatches still
    keeps the gradient of all parameters on each GPU, 4 bytes each, until the last of them."""
    lora: LoraConfig | None = None
    """Train adapters in place of all weights, or none."""
    max_skipped: Count = 3
    """Steps in a row whose gradient is not finite, and which are skipped, after which the run ends."""
    publish_every: Count = 1
    """Learner steps between two weight versions."""
    checkpoint_every: Count = 20
    """Learner steps between two checkpoints. They are written beside them, from a copy in the host's memory of 12
    bytes a parameter."""
    keep_checkpoints: Count = 2
    """Checkpoints kept on disk. One that is to stay longer needs a copy or another name."""


class RelayConfig(Section):
    """The relay tree that carries weights from the learner to the replicas."""

    topology: TopologyKind = TopologyKind.AUTO
    """Shape of the tree below the root; `auto`: the one that takes least time by the cost model, from the model's
    size, `link_gbit_per_s`, `overhead_us` and `zone_gbit_per_s`."""
    fanout: Count = 2
    """Children of a node in a `kary` tree."""
    zones: dict[str, str] = Field(default={})
    """Zone (rack, site) of each host by its address, e.g. `{10.0.1.4: rack-1}`; a zone is entered by one relay
    alone, which passes versions on inside. Hosts that are not named are one zone together."""
    link_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What a relay passes on to one other of its zone; default: measured at the start of a run whose tree has
    three nodes or more on several hosts, or 10."""
    overhead_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Fixed time of one chunk on one hop, microseconds; default: measured like `link_gbit_per_s`, or 200."""
    zone_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What all hosts of a zone together send to other zones; default: measured, from one host to one of another
    zone, like `link_gbit_per_s`, or as much as that."""
    nodes: Count = 3
    """Relay processes, the root included; replicas attach to them in turn, leaves first."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=64 * 2**20)] | None = None
    """Size of a chunk on the wire; default: the best by the cost model, or a smaller one that is as good."""
    max_bytes_per_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Bytes of weights that one relay sends on to all its children per second, at most, so that weights leave room
    on a network that is shared; a chunk may exceed it for a moment. `null`: no cap."""
    keep_versions: Count = 2
    """Complete versions a node keeps; one that a replica holds is kept longer."""
    shm: Path = Path("/dev/shm")
    """Shared memory that holds version folders."""
    host: str = "127.0.0.1"
    """Interface the relays listen on; every socket is CURVE-authenticated."""
    base_port: Annotated[int, Field(ge=1024, le=65000)] | None = None
    """First port of the tree, one per node; default: free ports chosen at start."""


class ClusterConfig(Section):
    """The Ray cluster that a run's parts are placed on: by default one of this machine, for this run alone."""

    address: Annotated[str, Field(pattern=r"^(auto|[^:/]+:[0-9]+)$")] | None = None
    """A running cluster to join: `host:port`, or `auto` for that of this machine; none: start one. All its nodes
    must see the working directory and the folders named here under the same paths; `laminar doctor` checks it."""
    learner_device: Device | None = None
    """What the learner's ranks, and a reference stage, run on, with `cuda` one GPU each; default: GPUs where
    launched SGLang servers run on them, CPUs otherwise."""
    shared_nodes: bool = True
    """Learner and replicas may be on one node (never on one GPU); `false`: on nodes of their own."""


class EmulationConfig(Section):
    """Engines and a learner that take the time which GPUs would take, and compute nothing: for measuring
    schedules, with the real controller, processes, relays and ledger."""

    profile: Path
    """YAML with the times of a GPU and a model, e.g. `configs/emulation/h100_7b.yaml`; `rollout.kv_capacity` and
    `rollout.max_batch` bound the engine as ever."""
    compression: Annotated[float, Field(ge=1, le=20)] = 1.0
    """Emulated seconds in one second; all other settings are in real seconds."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Emulated seconds over which the replicas begin, one after another; 0: all at once, in step at first."""
    learner_devices: Count = 1
    """GPUs that share a learner step."""
    median_tokens: Count = 1500
    """Median of the response lengths, which are log-normal and cut at `rollout.sampling.max_new_tokens`."""
    sigma: Annotated[float, Field(ge=0)] = 0.99
    """Standard deviation of their logarithm; 0.99 makes p99 10 times the median."""


class EvalConfig(Section):
    """Greedy evaluation on the held-out prompts."""

    every_steps: Count | None = None
    """Learner steps between two evaluations of RL; None: only before and after."""
    at_seconds: tuple[Seconds, ...] = ()
    """Seconds of RL after which the weights of that moment are evaluated too, in ascending order."""
    deferred: bool = False
    """Keep the weights in shared memory and evaluate when RL is over, off its clock, instead of meanwhile."""


class TrackingConfig(Section):
    """Where metrics go besides `metrics.jsonl`, see docs/metrics.md. Servers and keys are what the packages' own
    environment variables say."""

    kinds: tuple[TrackerKind, ...] = ()
    """Any of `tensorboard` (files in the run folder), `wandb`, and `mlflow` (a server, or `runs/mlflow.db`)."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """Project in wandb, experiment in MLflow; default: `name`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"tracking.kinds={','.join(self.kinds)}: one is named twice; name each once")
        return self


class SupervisorConfig(Section):
    """Detection and revival of dead parts."""

    heartbeat_timeout_s: Seconds = 30.0
    """A part that has not answered for so long is killed and started anew."""
    max_restarts: Count = 20
    """Restarts of one part after which the run gives up."""


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
        cut, recorded = sampling.cuts_vocabulary, Record.SAMPLING_MASK in self.rollout.record
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
        if Record.ROUTED_EXPERTS in rollout.record and self.emulation is not None:
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
