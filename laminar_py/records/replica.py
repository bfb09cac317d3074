"""Records between the controller and a rollout replica: assignments, reports, surveys, moves."""

from dataclasses import dataclass

import msgspec

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.recordings import RoutedExperts, SamplingMask
from laminar_py.records.trajectory import Break, FinishReason, Kind, Span


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
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
    more_to_come: bool = False  # of its pass, for which the replica keeps its version


class Progress(msgspec.Struct, frozen=True, kw_only=True):
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
