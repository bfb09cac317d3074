"""Records between the controller and a rollout replica: assignments, reports, surveys, moves."""

from dataclasses import dataclass

import msgspec

from laminar_py.records.codec import IntArray
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.environment import Problem
from laminar_py.records.events import VersionLoaded
from laminar_py.records.pieces import TokensRef
from laminar_py.records.proofs import ProbeAnswer
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, InterruptReason, Kind


class EarlierResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response to the prompt of an assignment, e.g. `EarlierResponse("g3.1", 7, (TokensRef(0, 41, at),))`."""

    trajectory_id: str
    version: int  # weights that sampled its last token
    tokens: tuple[TokensRef, ...]  # end to end


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Command to a replica to generate a trajectory, e.g. "g3.1" on its second replica, from token 41 on:

    `Assignment(trajectory_id="g3.1", epoch=1, group_id="g3", tokens=(TokensRef(0, 41, at),), ...)`.
    """

    trajectory_id: str
    epoch: int  # counts assignments of the trajectory; the controller ignores reports of an older epoch
    group_id: str
    kind: Kind
    prompt_ids: IntArray  # [P]
    sampling: SamplingParams
    version: int | None = None  # the only version that may continue it (drain, a resumed prefix); None: any
    tokens: tuple[TokensRef, ...] = ()  # response so far, end to end
    used_s: float = 0.0  # seconds of generation on earlier replicas
    more_to_come: bool = False  # the replica keeps its version, since its evaluation pass has more trajectories
    problem: Problem | None = None  # input of the environment; None: the trajectory has no environment
    earlier: tuple[EarlierResponse, ...] = ()  # of other replicas, the oldest first; the engine drafts from them

    @property
    def length(self) -> int:
        """Number of response tokens so far."""
        return self.tokens[-1].end if self.tokens else 0

    @property
    def routed(self) -> int:
        """Number of leading positions whose experts are recorded."""
        return max((tokens.routed for tokens in self.tokens), default=0)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a report: new tokens of one trajectory since the last report, or how the trajectory ended.

    E.g. 400 more tokens of "g3.1" behind the first 41: `Progress(trajectory_id="g3.1", epoch=1, start=41,
    tokens=TokensRef(41, 441, at), spans=(Span(7, 41, 441),))`.
    """

    trajectory_id: str
    epoch: int
    start: int  # number of response tokens that were reported before
    tokens: TokensRef | None = None  # from `start` on; None: no new tokens
    spans: tuple[Span, ...] = ()  # cover [spans[0].start, end); before `start` they replace earlier spans
    finish_reason: FinishReason | None = None
    cut: Cap | None = None  # cap on seconds or turns that ended the trajectory
    queue_s: float = 0.0  # seconds from its arrival at this replica to the first tokens
    generate_s: float = 0.0  # seconds since its arrival at this replica
    broken: InterruptReason | None = None  # its stream broke off, and it continues
    begun: int | None = None  # version of the first token, for an evaluation pass that needs it
    failure: DropReason | None = None  # it can never continue: its request is refused, or its environment failed
    lost: bool = False  # its response so far cannot be read, so no replica can continue it
    detail: str = ""  # of `failure` or `lost`
    environment_s: float = 0.0  # seconds of waiting for its environment here, including queues and transport

    @property
    def end(self) -> int:
        """Number of response tokens that are reported after this record."""
        return self.start if self.tokens is None else self.tokens.end


class TrajectorySummary(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A training trajectory in the survey of its replica, running or waiting.

    E.g. `TrajectorySummary(trajectory_id="g3.1", context=441, length=41)`: its prompt has 400 tokens.
    """

    trajectory_id: str
    context: int  # tokens of prompt and response: its size in the KV cache while it runs
    length: int  # response tokens
    observed: int = 0  # response tokens that its environment wrote
    turns: int = 0  # answers of its environment
    is_away: bool = False  # True while its environment answers a turn


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """State of a replica at one moment, as input of the repack planner, e.g. replica 2 with one trajectory:

    `Survey(replica=2, version=7, slots=64, kv_used=441, kv_capacity=131072, running=(summary,))`.
    """

    replica: int
    version: int
    slots: int  # most sequences that its engine decodes at the same time
    kv_used: int  # tokens
    kv_capacity: int  # tokens
    running: tuple[TrajectorySummary, ...]
    waiting: tuple[TrajectorySummary, ...] = ()  # without a token from this replica, in order of arrival
    can_move: bool = True  # False while it loads, stops or evaluates: no trajectory may move to or from it
    held_s: float = 0.0  # seconds that it has kept its version only for trajectories that wait for environments


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a replica, e.g. `ReplicaReport(replica=2, status=status, admissible=16, received=48)`."""

    replica: int
    status: EngineStatus
    admissible: int  # new training trajectories that it accepts beyond the `received` ones
    received: int  # new trajectories in its life; the controller subtracts later ones from `admissible`
    generated: int = 0  # training tokens since the last report
    progress: tuple[Progress, ...] = ()
    loads: tuple[VersionLoaded, ...] = ()
    lost: tuple[str, ...] = ()  # assigned trajectories whose version no relay has any more
    probes: tuple[ProbeAnswer, ...] = ()  # tokens that the engine drew after the run's probes


@dataclass(frozen=True, slots=True)
class Move:
    """Move of a trajectory between replicas, e.g. `Move("g3.1", 4, 2, 441)`."""

    trajectory_id: str
    source: int  # replica
    destination: int  # replica
    prefill: int  # tokens that the destination prefills again; 0 before the first token
