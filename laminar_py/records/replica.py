"""Records between the controller and a rollout replica: assignments, reports, surveys, moves."""

from dataclasses import dataclass

import msgspec

from laminar_py.records.codec import IntArray
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.environment import Problem
from laminar_py.records.events import VersionLoaded
from laminar_py.records.pieces import TokensRef
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, InterruptReason, Kind


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Order to a replica to generate a trajectory, e.g. "g3.1" for the second time, from its token 41 on:

    `Assignment(trajectory_id="g3.1", epoch=1, group_id="g3", tokens=(TokensRef(0, 41, at),), ...)`.
    """

    trajectory_id: str
    epoch: int  # counts assignments of the trajectory; the controller ignores reports of an older epoch
    group_id: str
    kind: Kind
    prompt_ids: IntArray  # [P]
    sampling: SamplingParams
    version: int | None = None  # the only version it may continue under (drain, a resumed prefix); None: any
    tokens: tuple[TokensRef, ...] = ()  # response so far, end to end
    used_s: float = 0.0  # seconds of generation on earlier replicas
    more_to_come: bool = False  # its evaluation pass has more: the replica keeps its version for them
    problem: Problem | None = None  # for the environment that answers its turns

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return self.tokens[-1].end if self.tokens else 0

    @property
    def routed(self) -> int:
        """Leading positions whose experts are recorded already."""
        return max((tokens.routed for tokens in self.tokens), default=0)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a report: new tokens of one trajectory since the last report, or how it ended.

    E.g. 400 more tokens of "g3.1" behind its first 41: `Progress(trajectory_id="g3.1", epoch=1, start=41,
    tokens=TokensRef(41, 441, at), spans=(Span(7, 41, 441),))`.
    """

    trajectory_id: str
    epoch: int
    start: int  # response tokens that were reported before
    tokens: TokensRef | None = None  # from `start` on; None: nothing new
    spans: tuple[Span, ...] = ()  # cover [spans[0].start, end); before `start` they replace earlier spans
    finish_reason: FinishReason | None = None
    cut: Cap | None = None  # cap that ended it, other than the one on tokens
    queue_s: float = 0.0  # seconds that it waited here for its first tokens
    generate_s: float = 0.0  # seconds since it came here
    broken: InterruptReason | None = None
    begun: int | None = None  # version of its first token, for an evaluation pass that needs it
    failure: DropReason | None = None  # it can never continue: its request is refused, or its environment failed
    lost: bool = False  # its response so far cannot be read, so no replica can continue it
    detail: str = ""  # of `failure` or `lost`
    environment_s: float = 0.0  # seconds here until its environment answered, with waits and transport

    @property
    def end(self) -> int:
        """Response tokens that are reported with this record."""
        return self.start if self.tokens is None else self.tokens.end


class TrajectorySummary(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A training trajectory on a replica, running or waiting, as its survey describes it.

    E.g. `TrajectorySummary(trajectory_id="g3.1", context=441, length=41)`: its prompt has 400 tokens.
    """

    trajectory_id: str
    context: int  # tokens of prompt and response: its size in the KV cache while it runs
    length: int  # response tokens
    observed: int = 0  # response tokens that its environment wrote
    turns: int = 0  # answers of its environment
    is_away: bool = False  # True while its environment answers a turn


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """State of a replica at one moment, by which repacking is planned, e.g. replica 2 with one trajectory:

    `Survey(replica=2, version=7, slots=64, kv_used=441, kv_capacity=131072, running=(summary,))`.
    """

    replica: int
    version: int
    slots: int  # sequences that its engine decodes at a time
    kv_used: int  # tokens
    kv_capacity: int  # tokens
    running: tuple[TrajectorySummary, ...]
    waiting: tuple[TrajectorySummary, ...] = ()  # without a token from this replica, in order of arrival
    can_move: bool = True  # False while it loads, stops or evaluates: nothing may move to or from it
    held_s: float = 0.0  # seconds that it kept its version only for trajectories whose environments work


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a replica to the controller, e.g. `ReplicaReport(replica=2, status=status, admissible=16,
    received=48)`."""

    replica: int
    status: EngineStatus
    admissible: int  # new training trajectories that it accepts now, beyond those it has received
    received: int  # new trajectories in its life; the controller subtracts later ones from `admissible`
    generated: int = 0  # training tokens since the last report
    progress: tuple[Progress, ...] = ()
    loads: tuple[VersionLoaded, ...] = ()
    lost: tuple[str, ...] = ()  # assigned trajectories whose version no relay has any more


@dataclass(frozen=True, slots=True)
class Move:
    """Move of a trajectory between replicas, e.g. `Move("g3.1", 4, 2, 441)`."""

    trajectory_id: str
    source: int  # replica
    destination: int  # replica
    prefill: int  # tokens that the destination prefills again; 0 before the first token
