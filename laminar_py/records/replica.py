"""Records between the controller and a rollout replica: assignments, reports, surveys, moves."""

from dataclasses import dataclass

import msgspec

from laminar_py.records.codec import IntArray
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.environment import Problem
from laminar_py.records.pieces import TokensRef
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Break, Cap, DropReason, FinishReason, Kind


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory handed to a replica. `epoch` fences it: reports of an older epoch count for nothing.

    `version` is set where the trajectory may continue only under that version (drain, a resumed prefix).
    """

    trajectory_id: str
    epoch: int
    group_id: str
    kind: Kind
    prompt_ids: IntArray  # [P]
    sampling: SamplingParams
    version: int | None = None
    tokens: tuple[TokensRef, ...] = ()  # of the response so far, end to end
    stores: dict[str, str] = {}  # names of the stores of segments among these that are of other hosts
    used_s: float = 0.0  # seconds of generation on replicas that had it before
    more_to_come: bool = False  # of its pass, for which the replica keeps its version
    problem: Problem | None = None  # where an environment answers its turns

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return self.tokens[-1].end if self.tokens else 0

    @property
    def routed(self) -> int:
        """Leading positions whose experts are recorded already."""
        return max((tokens.routed for tokens in self.tokens), default=0)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """News of one trajectory: what was stored of it since it was told of last, or how it ended.

    `spans` may begin before `tokens`: then they replace what was said of those tokens (see `Delta.spans`).
    """

    trajectory_id: str
    epoch: int
    start: int  # response tokens that were told before
    tokens: TokensRef | None = None  # from there on; None where there is nothing new
    spans: tuple[Span, ...] = ()  # cover [spans[0].start, end)
    finish_reason: FinishReason | None = None
    cut: Cap | None = None  # that ended it, where that is not the one on tokens
    queue_s: float = 0.0  # it waited here for its first tokens
    generate_s: float = 0.0  # since it came here
    broken: Break | None = None
    begun: int | None = None  # version of its first token, where somebody waits to know
    failure: DropReason | None = None  # it can never go on: its request is refused, or its environment failed
    lost: bool = False  # the response so far cannot be read, so that nobody can go on with it
    detail: str = ""  # of either
    environment_s: float = 0.0  # that its environment worked, since it came here

    @property
    def end(self) -> int:
        """Response tokens that are told with it."""
        return self.start if self.tokens is None else self.tokens.end


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A training trajectory that a replica has, e.g. `Held("g3.1", 441, 41)`: 400 tokens of prompt and 41 more."""

    trajectory_id: str
    context: int  # tokens of prompt and response: what its KV cache holds, or will when it runs
    length: int  # of response


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """State of a replica at one moment, by which repacking is planned; KV in tokens."""

    replica: int
    version: int
    slots: int  # sequences that its engine decodes at a time
    kv_used: int
    kv_capacity: int
    running: tuple[Held, ...]
    waiting: tuple[Held, ...] = ()  # without a token here yet, in the order in which they came
    settled: bool = True  # False while it loads, stops or evaluates: nothing moves to or from it
    held_s: float = 0.0  # that its version was kept for trajectories alone whose environments work


class WeightLoad(msgspec.Struct, frozen=True):
    """A replica loaded `version` with this digest in `elapsed_s` seconds.

    `checksum` hashes the engine's own tensors after the load, where the load was verified; engines of one kind,
    layout and version agree in it.
    """

    version: int
    digest: str
    elapsed_s: float
    checksum: str | None = None


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """Message of a replica to the controller: progress, its state, and how much more it takes."""

    replica: int
    status: EngineStatus
    admissible: int  # new training trajectories it takes now, beyond those received
    received: int  # new ones that it has received in its life; those still under way are not in `admissible`
    generated: int = 0  # training tokens since the last report
    progress: tuple[Progress, ...] = ()
    loads: tuple[WeightLoad, ...] = ()
    lost: tuple[str, ...] = ()  # assigned trajectories whose version no relay has any more


@dataclass(frozen=True, slots=True)
class Move:
    """A trajectory's way from a replica to another, e.g. `Move("g3.1", 4, 2, 441)`."""

    trajectory_id: str
    source: int
    destination: int
    prefill: int  # tokens whose KV cache the destination computes anew; 0 where it had not begun
