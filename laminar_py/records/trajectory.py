"""Prompts, trajectories and microbatches, and the states of a trajectory.

L is the number of response tokens of a trajectory, P of its prompt. Token ids and log-probabilities come from the
engine and are never recomputed from text. The controller decides by `TrajectoryRef`, which refers to the
tokens; the learner and the reference model read the tokens into a `Trajectory`; the packer makes a `MicroBatch`
of several trajectories.
"""

from enum import StrEnum
from functools import lru_cache
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import BoolArray, FloatArray, IntArray
from laminar_py.records.columns import Array, TokenValues
from laminar_py.records.credit import Earned, RoleCredit, earned_by
from laminar_py.records.pieces import ColumnRef, PieceRef, RoutedExperts, SamplingMask, TokensRef
from laminar_py.records.spans import Span, TokenPath, is_tree, sequences_of


class Status(StrEnum):
    """State of a trajectory. `ledger.machine` changes the state when it applies an event:

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
    """Why sampling of a response ended. `docs/rooms/records.md` compares all reasons for which a response ends."""

    STOP = "stop"  # the engine sampled a stop id, or the environment ended the trajectory
    LENGTH = "length"  # the response reached the cap on tokens, seconds or turns; `Cap` names it
    ABORT = "abort"  # the replica aborted the request, and another replica continues the trajectory


class Cap(StrEnum):
    """Limit that ended a trajectory early; the event `Cut` has the limit's value."""

    TOKENS = "tokens"
    SECONDS = "seconds"
    TURNS = "turns"


class InterruptReason(StrEnum):
    """Why a replica's stream of tokens broke off; the trajectory continues from its last token."""

    NEW_WEIGHTS = "new_weights"  # the replica stopped the request to load new weights, and submits it again
    ENGINE_LOST = "engine_lost"  # the engine was lost before the stream's last delta


class DropReason(StrEnum):
    """Why a trajectory never reaches the learner (law 6: each drop is an event with one of these)."""

    NO_SIGNAL = "no_signal"  # all rewards of its group are equal
    STALE = "stale"  # its staleness was above the bound when a step would have consumed it
    TOO_LONG = "too_long"  # more tokens than a microbatch holds
    REFUSED = "refused"  # the engine refused its request
    VERSION_LOST = "version_lost"  # no relay has the weights that it must continue under
    TOKENS_LOST = "tokens_lost"  # its stored tokens are missing or damaged
    GROUP_DEADLINE = "group_deadline"  # its group closed without it
    GROUP_LOST = "group_lost"  # too few members of its group are left
    ENVIRONMENT_FAILED = "environment_failed"  # the environment raised, or its answer was invalid
    ENVIRONMENT_TIMEOUT = "environment_timeout"  # the environment took too long
    ENVIRONMENT_LOST = "environment_lost"  # the environment crashed and cannot be rebuilt
    REWARD_FAILED = "reward_failed"  # the reward function raised
    REWARD_TIMEOUT = "reward_timeout"  # the reward function took too long
    RUN_ENDED = "run_ended"  # an evaluation was under way when the run ended


class Kind(StrEnum):
    """Purpose of a trajectory. The learner never trains on evaluations, and reports count them separately."""

    TRAIN = "train"
    EVAL = "eval"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A problem at its place in the stream, e.g. `Prompt(id="p7", index=7, text="2+2=", ids=ids, answer="4")`."""

    id: str
    index: int  # place in the stream
    text: str  # as the model reads it
    ids: IntArray  # [P]
    answer: str = ""  # reference answer, for the reward
    task: str = ""  # reports have figures for each task
    fields_json: bytes = b"{}"  # other fields of the problem's line, for the reward alone, e.g. `b'{"level": 3}'`


@lru_cache(maxsize=16)  # the packer asks for one part of a tree after another
def _tree_paths(spans: tuple[Span, ...]) -> tuple[TokenPath, ...]:
    return tuple(sequences_of(spans))


class BaseTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that a finished sample has with its tokens (`Trajectory`) and without (`TrajectoryRef`)."""

    id: str
    prompt_id: str
    group_id: str
    sample_index: int  # place in its group
    kind: Kind
    prompt_ids: IntArray  # [P]
    spans: tuple[Span, ...]  # cover [0, L)
    finish_reason: FinishReason
    reward: float | None = None  # None: not scored yet
    advantage: float = 0.0
    advantage_scale: float = 1.0  # advantage per unit of reward
    weight: float = 1.0  # factor on its loss (staleness reweighting)
    roles: tuple[RoleCredit, ...] = ()  # rewards and advantages by role, if there are several roles
    sequences: tuple[int, ...] = ()  # of a tree's part: places in `sequences_of`; empty: all

    @property
    def token_paths(self) -> list[TokenPath]:
        """Its sequences, or of a part the part's."""
        if not is_tree(self.spans):
            end = self.spans[-1].end if self.spans else 0
            return [TokenPath(has_prompt=True, parts=((0, end, True),))]
        found = _tree_paths(self.spans)
        return [found[place] for place in self.sequences or range(len(found))]

    @property
    def is_first_part(self) -> bool:
        """True of one part of a tree, and of a whole trajectory: each trajectory counts once."""
        return not self.sequences or self.sequences[0] == 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all its sequences: prompt and response, or more if the response is a tree."""
        return sum([path.num_tokens(len(self.prompt_ids)) for path in self.token_paths])

    @property
    def oldest_version(self) -> int:
        """Lowest weight version that sampled a token; the age of this version is the trajectory's staleness."""
        return min(span.version for span in self.spans if span.version is not None)


class TrajectoryRef(BaseTrajectory, frozen=True, kw_only=True):
    """A finished sample by reference, e.g. "g3.1" with 41 response tokens in one piece under version 7:

    `TrajectoryRef(id="g3.1", tokens=(TokensRef(0, 41, at),), num_trained=41, spans=(Span(7, 0, 41),), ...)`.
    `ledger.segments.reader` reads the tokens.
    """

    tokens: tuple[TokensRef, ...]  # end to end over [0, L)
    num_trained: int  # response tokens that the learner trains on
    earned: Earned | None = None  # summary of its process rewards, if it has any
    columns: dict[str, ColumnRef] = {}  # by name

    @property
    def length(self) -> int:
        """Response tokens, L."""
        return self.tokens[-1].end if self.tokens else 0

    @property
    def refs(self) -> list[PieceRef]:
        """References to all stored pieces of the response: tokens first, then columns."""
        return [*(tokens.at for tokens in self.tokens), *(column.at for column in self.columns.values())]


class Trajectory(BaseTrajectory, frozen=True, kw_only=True):
    """A finished sample with its tokens, e.g. "g3.1" with 41 response tokens under version 7:

    `Trajectory(id="g3.1", response_ids=ids, logprobs=logprobs, loss_mask=mask, spans=(Span(7, 0, 41),), ...)`.
    """

    response_ids: IntArray  # [L]
    logprobs: FloatArray  # [L] of the policy that sampled the tokens; 0 on tokens of an environment
    loss_mask: BoolArray  # [L] True on tokens that the learner trains on
    sampling_mask: SamplingMask | None = None  # L rows; an empty row: the whole vocabulary
    routed_experts: RoutedExperts | None = None  # of P + L - 1 positions
    columns: dict[str, TokenValues] = msgspec.field(default_factory=dict)  # by name, each [L]

    @property
    def num_trained(self) -> int:
        """Response tokens where the loss mask is True."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def earned(self) -> Earned | None:
        """Summary of the process rewards of trained tokens; None if only the whole response has a reward."""
        return earned_by(self.columns, among=self.loss_mask)


Packable: TypeAlias = TrajectoryRef | Trajectory
"""A trajectory to pack. Only a `Trajectory` has the tokens, which placement does not need."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences of R responses, packed without padding into S segments of T tokens, e.g. two of 3 and 2 tokens:

    `cu_seqlens [0, 3, 5]`, `position_ids [0, 1, 2, 0, 1]`. A segment that begins a sequence has the parent -1;
    another continues its parent, and its tokens see all tokens of the parent and of the segments above that.
    `labels[t]` is the token after `input_ids[t]` in the same sequence (0 at a sequence's end). From `loss_weights`
    on, a [T] array has a token's number at the position that predicts the token.
    """

    input_ids: IntArray  # [T]
    cu_seqlens: IntArray  # [S + 1]
    position_ids: IntArray  # [T]
    labels: IntArray  # [T]
    loss_weights: FloatArray  # [T] 0 where nothing is learned; they sum to 1 over all microbatches of a step
    behaviour_logprobs: FloatArray  # [T] of the policy that sampled the token
    advantages: FloatArray  # [T]
    staleness: IntArray  # [T] learner steps since the weights that generated the token
    responses: IntArray  # [S] index of each segment's response, in [0, R); of shared ones that train nothing, any
    rewards: FloatArray  # [R] of whole responses
    groups: IntArray  # [R] index of each response's group in the step
    columns: dict[str, Array] = msgspec.field(default_factory=dict)  # inputs of the loss by name, each [T]
    support: SamplingMask | None = None  # T rows: ids that the label was drawn from; empty row: whole vocabulary
    experts: npt.NDArray[np.int16] | None = None  # [T, layers, k] of input tokens, -1 where not recorded
    id_sum: int = 0  # of the trajectories' ids, see `records.proofs.id_sum`
    parents: IntArray | None = None  # [S] an earlier segment each; None: every segment is a sequence

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens, T."""
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """[S] tokens of each segment."""
        lengths: list[int] = np.diff(self.cu_seqlens).tolist()
        return lengths

    @property
    def key_rows(self) -> tuple[IntArray, list[int]]:
        """[K] rows whose keys the segments see, segment by segment, and how many rows each sees."""
        starts, rows = self.cu_seqlens.tolist(), list[IntArray]()
        parents = [-1] * len(starts[1:]) if self.parents is None else self.parents.tolist()
        for parent, first, last in zip(parents, starts[:-1], starts[1:], strict=True):
            own = np.arange(first, last, dtype=np.int32)
            rows.append(own if parent < 0 else np.concatenate([rows[parent], own]))
        return np.concatenate(rows), [len(each) for each in rows]

    @property
    def squares(self) -> float:
        """Sum of the squared lengths of sequences, shared parts once: twice the pairs of causal attention."""
        ends = self.position_ids[self.cu_seqlens[1:] - 1].astype(np.float64) + 1
        starts = self.position_ids[self.cu_seqlens[:-1]].astype(np.float64)
        return float((ends * ends - starts * starts).sum())
