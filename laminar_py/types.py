"""Records that cross parts and processes. Owns their shapes and the trajectory's state machine; no behaviour.

L is the number of response tokens of one trajectory, P of its prompt, T the packed tokens of a microbatch,
S its sequences. Token ids and log-probabilities come from the engine and are never recomputed from text.
"""

from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.codec import BoolArray, FloatArray, IntArray


class Status(StrEnum):
    """Where a trajectory is. Transitions are made by `control.lifecycle.Lifecycle` alone:

    QUEUED -> RUNNING -> (INTERRUPTED -> RUNNING)* -> FINISHED -> SCORED -> READY -> CONSUMED,
    CONSUMED -> READY when a rollback undoes a step, and DROPPED from any state but CONSUMED.
    """

    QUEUED = "queued"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    SCORED = "scored"
    READY = "ready"
    CONSUMED = "consumed"
    DROPPED = "dropped"


class FinishReason(StrEnum):
    """Why an engine ended a response: a stop id, the token cap, or a call of `abort`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Break(StrEnum):
    """Why a stream stopped although its trajectory goes on."""

    NEW_WEIGHTS = "new_weights"  # its replica interrupted it for new weights, and submits it again
    CUT = "cut"  # the engine was lost before its last word


class DropReason(StrEnum):
    """Why a trajectory never reaches the learner (law 6: each drop is an event with one of these)."""

    NO_SIGNAL = "no_signal"  # all rewards of its group are equal
    STALE = "stale"  # staleness above the bound when it was to be consumed
    TOO_LONG = "too_long"  # more tokens than a microbatch holds
    REFUSED = "refused"  # the engine does not take its request
    VERSION_LOST = "version_lost"  # no copy of its weights is left to continue under
    GROUP_DEADLINE = "group_deadline"  # its group closed without it
    GROUP_LOST = "group_lost"  # too few survivors in its group
    REWARD_FAILED = "reward_failed"  # the reward function raised
    REWARD_TIMEOUT = "reward_timeout"  # the reward function took too long
    RUN_ENDED = "run_ended"  # an evaluation that was under way when the run ended


class Kind(StrEnum):
    """What a trajectory is for. Evaluations are accounted for apart and never train."""

    TRAIN = "train"
    EVAL = "eval"


class PauseMode(StrEnum):
    """What `InferenceEngine.pause` does with running requests (SGLang's three modes)."""

    ABORT = "abort"  # they end, their partial response is delivered
    RETRACT = "retract"  # they go back to the queue and are prefilled again
    IN_PLACE = "in_place"  # they stop where they are and keep their KV cache


class Record(StrEnum):
    """What an engine records beside tokens and log-probabilities, where it is asked to."""

    SAMPLING_MASK = "sampling_mask"
    ROUTED_EXPERTS = "routed_experts"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) were generated under `version`, e.g. `Span(7, 0, 41)`.

    `kv_version` is set where they attended to a KV cache that older weights had made: the oldest of those.
    """

    version: int
    start: int
    end: int
    kv_version: int | None = None


class SamplingMask(msgspec.Struct, frozen=True):
    """The vocabulary that n tokens were drawn from, row after row, e.g. two tokens out of {3, 5} and {9}:

    `SamplingMask(counts=[2, 1], ids=[3, 5, 9])`.
    """

    counts: IntArray  # [n]
    ids: IntArray  # [sum of counts]


class RoutedExperts(msgspec.Struct, frozen=True):
    """The experts that positions [start, start + positions) of prompt and response went to, in every layer.

    `data` is [positions, layers, top_k] of unsigned little-endian integers of `width` bytes. The last token of
    a response is never an input, so a whole trajectory has P + L - 1 positions.
    """

    start: int
    layers: int
    top_k: int
    width: int  # 1 or 2
    data: bytes

    @property
    def positions(self) -> int:
        """Tokens covered."""
        return len(self.data) // (self.layers * self.top_k * self.width)

    @property
    def table(self) -> npt.NDArray[np.int16]:
        """[positions, layers, top_k]."""
        flat = np.frombuffer(self.data, f"<u{self.width}").astype(np.int16)
        return flat.reshape(-1, self.layers, self.top_k)


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn, e.g. `SamplingParams(max_new_tokens=344, stop_ids=(1,))`.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 leave the vocabulary whole. `max_new_tokens`
    counts all response tokens, those of a resumed prefix included. One `seed` and one position always give the
    same uniform number, whatever the request is batched with (SGLang draws freely).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


class Prompt(msgspec.Struct, frozen=True):
    """One problem, e.g. `Prompt("p17", 17, "2+2=", ids, "4")`. `index` is its place in the stream."""

    id: str
    index: int
    text: str
    ids: IntArray  # [P]
    answer: str = ""
    task: str = ""  # where a run mixes several: reports tell them apart


class GenerateRequest(msgspec.Struct, frozen=True):
    """What an engine is asked for: continue `prompt_ids + prefix_ids`, e.g. after an abort at token 41.

    Requests of one `group_id` share their prompt, so an engine may prefill it once.
    """

    rid: str
    group_id: str
    prompt_ids: IntArray  # [P]
    prefix_ids: IntArray  # [L so far], generated earlier
    sampling: SamplingParams
    routed: int = 0  # leading positions whose experts are recorded already


class Delta(msgspec.Struct, frozen=True):
    """New tokens of one request, all generated under `version`; the last delta has a finish reason.

    Weights that change under a running stream may leave the place of the change uncertain until it ends; then
    `spans` in the last delta is the engine's own account of the whole stream, and replaces the `version`s.
    """

    rid: str
    ids: IntArray  # [n] new response tokens, n >= 0
    logprobs: FloatArray  # [n] log-probability of the drawn token in the distribution that it was drawn from
    version: int
    finish_reason: FinishReason | None = None
    kv_version: int | None = None  # as in `Span`
    spans: tuple[Span, ...] | None = None  # [0, tokens of this stream)
    sampling_mask: SamplingMask | None = None  # n rows
    routed_experts: RoutedExperts | None = None  # in the last delta, from `GenerateRequest.routed` on


class EngineStatus(msgspec.Struct, frozen=True):
    """One look at an engine, e.g. `EngineStatus(running=64, waiting=3, kv_used=5120, ...)`; KV in tokens."""

    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    version: int  # -1 before the first load


class Assignment(msgspec.Struct, frozen=True):
    """A trajectory handed to a replica. `epoch` fences it: reports of an older epoch count for nothing.

    `version` is set where the trajectory may continue only under that version (drain, a resumed prefix).
    """

    trajectory_id: str
    epoch: int
    group_id: str
    kind: Kind
    prompt_ids: IntArray  # [P]
    prefix_ids: IntArray  # [L so far]
    sampling: SamplingParams
    version: int | None = None
    used_s: float = 0.0  # seconds of generation on replicas that had it before
    routed: int = 0  # leading positions whose experts are recorded already


class Progress(msgspec.Struct, frozen=True):
    """New tokens of one trajectory since the last report; `start` is their place in the response.

    `spans` may begin before `start`: then they replace what was said of those tokens (see `Delta.spans`).
    """

    trajectory_id: str
    epoch: int
    start: int
    ids: IntArray  # [n]
    logprobs: FloatArray  # [n]
    spans: tuple[Span, ...]  # cover [spans[0].start, start + n)
    finish_reason: FinishReason | None = None
    wall_cut: bool = False  # ended by the cap on wall time
    queue_s: float = 0.0  # it waited here for its first tokens
    generate_s: float = 0.0  # since it came here
    sampling_mask: SamplingMask | None = None  # n rows
    routed_experts: RoutedExperts | None = None
    broken: Break | None = None
    refusal: str = ""  # the engine's words, where it does not take the request


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A training trajectory that a replica has, e.g. `Held("g3.1", 441, 41)`: 400 tokens of prompt and 41 more."""

    trajectory_id: str
    context: int  # tokens of prompt and response: what its KV cache holds, or will when it runs
    length: int  # of response


class Survey(msgspec.Struct, frozen=True):
    """All that a replica has at this moment; KV in tokens. What repacking is planned by."""

    replica: int
    version: int
    slots: int  # sequences that its engine decodes at a time
    kv_used: int
    kv_capacity: int
    running: tuple[Held, ...]
    waiting: tuple[Held, ...] = ()  # without a token here yet, in the order in which they came
    settled: bool = True  # False while it loads, stops or evaluates: nothing moves to or from it


class Load(msgspec.Struct, frozen=True):
    """A replica loaded `version` with this digest in `elapsed_s` seconds.

    `checksum` hashes the engine's own tensors after the load, where the load was verified; engines of one kind,
    layout and version agree in it.
    """

    version: int
    digest: str
    elapsed_s: float
    checksum: str | None = None


class ReplicaReport(msgspec.Struct, frozen=True):
    """What a replica tells the controller at a time: progress, its state, and how much more it takes."""

    replica: int
    status: EngineStatus
    admissible: int  # new training trajectories it takes now, beyond those received
    received: int  # new ones that it has received in its life; those still under way are not in `admissible`
    progress: tuple[Progress, ...] = ()
    loads: tuple[Load, ...] = ()
    lost: tuple[str, ...] = ()  # assigned trajectories whose version no relay has any more


class Trajectory(msgspec.Struct, frozen=True):
    """One finished sample, e.g. 41 tokens under one version; masks and experts join it when it trains:

    `Trajectory("g3.1", "p17", "g3", 1, Kind.TRAIN, prompt_ids, ids, logprobs, mask, (Span(7, 0, 41),), ...)`.
    """

    id: str
    prompt_id: str
    group_id: str
    sample_index: int
    kind: Kind
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L]
    logprobs: FloatArray  # [L] of the behaviour policy, as sampled
    loss_mask: BoolArray  # [L] False on tokens the environment wrote
    spans: tuple[Span, ...]  # cover [0, L)
    finish_reason: FinishReason
    reward: float | None = None
    token_rewards: FloatArray | None = None  # [L]
    advantage: float = 0.0
    advantage_scale: float = 1.0  # what a unit of reward is in it
    weight: float = 1.0  # factor on its loss (staleness reweighting)
    sampling_mask: SamplingMask | None = None  # L rows, none of a token: the whole vocabulary
    routed_experts: RoutedExperts | None = None
    reference_logprobs: FloatArray | None = None  # [L] of the reference model, where that is a stage

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def oldest_version(self) -> int:
        """The lowest version in it; staleness counts from there."""
        return min(span.version for span in self.spans)

    def staleness(self, learner_version: int) -> int:
        """Versions between the oldest weights in it and the learner's."""
        return learner_version - self.oldest_version


class ScoringRequest(msgspec.Struct, frozen=True):
    """What a reward function sees, e.g. `ScoringRequest("g3.1", "2+2=", "4", "4", FinishReason.STOP, ids)`."""

    trajectory_id: str
    prompt: str
    response: str  # made of the ids where it is scored; empty on its way there
    answer: str
    finish_reason: FinishReason
    response_ids: IntArray  # [L]


class Score(msgspec.Struct, frozen=True):
    """A verdict: a scalar, optionally per-token scores or teacher log-probabilities; or why there is none."""

    trajectory_id: str
    value: float | None
    token_values: FloatArray | None = None  # [L]
    elapsed_s: float = 0.0
    failure: DropReason | None = None
    detail: str = ""


class MicroBatch(msgspec.Struct, frozen=True):
    """S sequences packed without padding into T tokens.

    Two sequences of 3 and 2 tokens: `cu_seqlens [0, 3, 5]`, `position_ids [0, 1, 2, 0, 1]`. `labels[t]` is the
    token after `input_ids[t]` in the same sequence (0 at a sequence's end); the per-token arrays stand at
    the position that predicts the token, and `loss_weights` is 0 where nothing is learned.
    """

    input_ids: IntArray  # [T]
    cu_seqlens: IntArray  # [S + 1]
    position_ids: IntArray  # [T]
    labels: IntArray  # [T]
    loss_weights: FloatArray  # [T] sums to 1 over the step, all ranks together (less where staleness reweights)
    behaviour_logprobs: FloatArray  # [T]
    advantages: FloatArray  # [T]
    staleness: IntArray  # [T] versions between the learner and what made the token
    teacher_logprobs: FloatArray | None = None  # [T] of another model, for distillation
    support: SamplingMask | None = None  # of T tokens; none of a token: it is the whole vocabulary
    rewards: FloatArray | None = None  # [S], as the next, where the algorithm asks for them
    groups: IntArray | None = None  # place of each sequence's group in the step
    experts: npt.NDArray[np.int16] | None = None  # [T, layers, k] as recorded, -1 where not
    reference_logprobs: FloatArray | None = None  # [T] of the reference model

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """[S] tokens of each sequence."""
        lengths: list[int] = np.diff(self.cu_seqlens).tolist()
        return lengths


class TokenMetrics(msgspec.Struct, frozen=True):
    """What a step did to trained tokens: means with their loss weights, but for the counts named so.

    KL in nats, from the policy named first, on tokens of the behaviour policy, by estimators k1 (may be negative)
    and k3 (never is).
    """

    num_tokens: int = 0
    entropy: float = 0.0
    ratio: float = 1.0  # of new to proximal probability
    ratio_deviation: float = 0.0  # |ratio - 1|
    ratio_max: float = 0.0  # the largest of any token
    clip_fraction: float = 0.0  # whose ratio is outside the clip range
    truncated_fraction: float = 0.0  # whose ratio is above the importance cap
    kl_behaviour_k1: float = 0.0  # behaviour to new policy
    kl_behaviour_k3: float = 0.0
    kl_proximal_k1: float = 0.0  # proximal to new policy
    kl_proximal_k3: float = 0.0
    kl_reference_k3: float = 0.0  # new policy to reference model; 0 without one
    effective_share: float = 1.0  # effective sample size of the weights new / behaviour, of the tokens
    advantage_mean: float = 0.0
    advantage_std: float = 0.0
    advantage_max: float = 0.0  # the largest |advantage| of any token


class Mismatch(msgspec.Struct, frozen=True):
    """|new - behaviour| log-probability of tokens at staleness 0 before the step's first update, in nats.

    It is what engine and learner compute differently; where not every step publishes, also what the policy has
    moved since it did.
    """

    mean: float = 0.0
    p99: float = 0.0  # upper edge of its bin, an eighth of a decade
    max: float = 0.0


class Work(msgspec.Struct, frozen=True):
    """What all ranks computed in a step, e.g. `Work(65536, 2.9e15, 7.9e15)`."""

    num_tokens: int = 0  # of prompts and responses, each counted once
    flops: float = 0.0  # model FLOPs, see `learner.flops`
    peak_flops: float | None = None  # per second, of their devices together; None where that is not known


class StepMetrics(msgspec.Struct, frozen=True):
    """What one learner step measured."""

    loss: float
    grad_norm: float
    elapsed_s: float
    tokens: TokenMetrics = TokenMetrics()
    by_staleness: dict[str, TokenMetrics] = {}  # e.g. of tokens that are "3-4" versions old
    mismatch: Mismatch = Mismatch()
    updates: int = 1
    skipped: int = 0  # of the updates, whose gradient was not finite; losses, norms and tokens are of the others
    reference_s: float = 0.0  # of `elapsed_s`, in the reference model
    work: Work = Work()

    @property
    def tokens_per_s(self) -> float:
        """All tokens of the step, prompts too, over its seconds."""
        return self.work.num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def flops_per_s(self) -> float:
        """Model FLOPs over its seconds."""
        return self.work.flops / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def mfu(self) -> float | None:
        """Share of what the devices could compute; None where that is not known."""
        peak = self.work.peak_flops
        return None if peak is None else self.flops_per_s / peak


class Published(msgspec.Struct, frozen=True):
    """A weight version, complete in the root's store; `stall_s` is how long the learner stood still for it."""

    version: int
    digest: str
    num_bytes: int
    stall_s: float
