"""Trajectories and prompts as they cross parts and processes, and the states of a trajectory. No behaviour.

L is the number of response tokens of one trajectory, P of its prompt. Token ids and log-probabilities come from
the engine and are never recomputed from text. Decisions need counts and references (`records.finished`); who
trains on a trajectory, or refers to it, has its tokens.
"""

from enum import StrEnum

import msgspec
import numpy as np

from laminar_py.records.codec import BoolArray, FloatArray, IntArray
from laminar_py.records.columns import TokenValues
from laminar_py.records.recordings import RoutedExperts, SamplingMask
from laminar_py.records.returns import Earned, earned_by
from laminar_py.records.roles import RoleCredit
from laminar_py.records.spans import Span
from laminar_py.records.tree import packed_tokens


class Status(StrEnum):
    """State of a trajectory. `ledger.machine` makes the transitions, as events are applied:

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


class Cap(StrEnum):
    """Limits of a trajectory, each of which ends it early and is told with its value."""

    TOKENS = "tokens"
    SECONDS = "seconds"
    TURNS = "turns"


class Break(StrEnum):
    """Why a stream stopped although its trajectory goes on."""

    NEW_WEIGHTS = "new_weights"  # its replica interrupted it for new weights, and submits it again
    CUT = "cut"  # the engine was lost before its last word


class DropReason(StrEnum):
    """Why a trajectory never reaches the learner (law 6: each drop is an event with one of these)."""

    NO_SIGNAL = "no_signal"  # all rewards of its group are equal
    STALE = "stale"  # staleness above the bound when it was to be consumed, or once its late score had come
    TOO_LONG = "too_long"  # more tokens than a microbatch holds
    REFUSED = "refused"  # the engine does not take its request
    VERSION_LOST = "version_lost"  # no copy of its weights is left to continue under
    HOST_LOST = "host_lost"  # its tokens are gone with the host that alone had them, or were changed there
    GROUP_DEADLINE = "group_deadline"  # its group closed without it
    GROUP_LOST = "group_lost"  # too few survivors in its group
    ENVIRONMENT_FAILED = "environment_failed"  # it raised, or what it answered is no answer
    ENVIRONMENT_TIMEOUT = "environment_timeout"  # it took too long
    ENVIRONMENT_LOST = "environment_lost"  # it died, and cannot be rebuilt
    REWARD_FAILED = "reward_failed"  # the reward function raised
    REWARD_TIMEOUT = "reward_timeout"  # the reward function took too long
    RUN_ENDED = "run_ended"  # an evaluation that was under way when the run ended


class Kind(StrEnum):
    """Purpose of a trajectory. Evaluations are accounted for apart and never train."""

    TRAIN = "train"
    EVAL = "eval"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A problem, e.g. "2+2=" with the answer "4"; `index` is its place in the stream.

    `fields_json` has what else its line in the data set has, e.g. `b'{"level": 3}'`, and go to the reward alone.
    """

    id: str
    index: int
    text: str
    ids: IntArray  # [P]
    answer: str = ""
    task: str = ""  # where a run mixes several: reports tell them apart
    fields_json: bytes = b"{}"  # a JSON object


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A finished sample with its tokens, e.g. 41 of "g3.1" with `spans=(Span(7, 0, 41),)`: all under version 7."""

    id: str
    prompt_id: str
    group_id: str
    sample_index: int
    kind: Kind
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L]
    logprobs: FloatArray  # [L] of the behaviour policy, as sampled
    loss_mask: BoolArray  # [L] False on tokens the environment wrote, and where nothing is to be learned of it
    spans: tuple[Span, ...]  # cover [0, L)
    finish_reason: FinishReason
    reward: float | None = None
    advantage: float = 0.0
    advantage_scale: float = 1.0  # what a unit of reward is in it
    weight: float = 1.0  # factor on its loss (staleness reweighting)
    roles: tuple[RoleCredit, ...] = ()  # where these have rewards, and so advantages, of their own
    sampling_mask: SamplingMask | None = None  # L rows, none of a token: the whole vocabulary
    routed_experts: RoutedExperts | None = None
    columns: dict[str, TokenValues] = msgspec.field(default_factory=dict)  # by name, each [L]

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences: prompt and response, where that is one."""
        return packed_tokens(len(self.prompt_ids), self.spans)

    @property
    def num_trained(self) -> int:
        """Response tokens where the loss mask is True."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def earned(self) -> Earned | None:
        """Process rewards before each token in short; None where the response is scored as a whole."""
        return earned_by(self.columns, among=self.loss_mask)

    @property
    def oldest_version(self) -> int:
        """The lowest version in it, whose age is its staleness."""
        return min(span.version for span in self.spans if span.version is not None)
