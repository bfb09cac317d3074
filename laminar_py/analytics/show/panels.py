"""Records of the page: what each panel of `report.html` draws, as JSON. `web/*.js` reads these fields by name.

Invariant: everything is bounded, however long the run; where a bound leaves something out, the record says so.
"""

import base64

import msgspec
import numpy as np
import numpy.typing as npt


class Packed(msgspec.Struct, frozen=True):
    """An array in base64, e.g. `Packed("uint32", "AQAAAA==")`, little-endian; None would be NaN."""

    type: str  # of the view that the page makes of it: uint8, uint16, uint32, int32, float32
    data: str


def pack(array: npt.NDArray[np.generic], kind: str) -> Packed:
    """`array` [n] as numbers of that type."""
    return Packed(kind, base64.b64encode(array.astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode())


class StageBar(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the mean step, e.g. `StageBar("generation", 0.0, 31.5, binding=True)`.

    It begins `start_s` into the step: stages that overlap begin together, those that wait for another after it.
    """

    name: str
    start_s: float
    seconds: float
    binding: bool = False
    note: str = ""


class RemedyLine(msgspec.Struct, frozen=True):
    """What to change, and what for, e.g. `RemedyLine("rollout.replicas: 8 -> 16", "34 s -> 19 s")`."""

    change: str
    gain: str = ""


class WallPanel(msgspec.Struct, frozen=True, kw_only=True):
    """What limits the run, e.g. `WallPanel("generation", ("replicas are busy 97% of the step",), ...)`."""

    name: str
    evidence: tuple[str, ...] = ()
    remedies: tuple[RemedyLine, ...] = ()
    stages: tuple[StageBar, ...] = ()  # none: the page draws what the learner's steps took
    step_s: float = 0.0  # mean, measured
    meaning: str = ""  # in a sentence, for those to whom the name says nothing


class Figure(msgspec.Struct, frozen=True):
    """One number of the headline, e.g. `Figure("goodput", "8,102 tokens/s", "trained, per second of RL")`."""

    name: str
    value: str
    note: str = ""


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Of all trajectories, also those without a bar: [replicas x bins] mean number running, and mean version."""

    start_s: float
    bin_s: float
    bins: int
    running: Packed
    version: Packed  # NaN where nothing ran


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Stays [M] of trajectories [N] on replicas; times in milliseconds since `Timeline.start_s`."""

    of: Packed  # [M] place in what follows below
    replica: Packed  # place in `Timeline.replicas`
    version: Packed
    fate: Packed  # `stays.StayEnd`
    start: Packed
    end: Packed
    ids: list[str]  # [N]
    length: Packed  # [N] as all that follow
    status: Packed  # place in `statuses`
    reward: Packed  # NaN: none
    staleness: Packed  # -1: none
    is_eval: Packed
    statuses: list[str]


class Move(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """`count` trajectories went from one replica to another at once; places in `Timeline.replicas`."""

    at_s: float
    source: int
    destination: int
    count: int
    repacked: bool  # else by an interruption or a death


class StepBar(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A learner step: it got its batch at `start_s`, having waited; `reward` is the mean of what it trained on."""

    step: int
    start_s: float
    end_s: float
    waited_s: float
    trajectories: int
    tokens: int
    reward: float


class Mark(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Something at a moment: of `row`, a replica's place or -1 for the learner."""

    at_s: float
    kind: str  # publish, load, checkpoint, death, rollback
    row: int
    version: int
    text: str


class Transfer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A version on its way to a relay, `row` being its place in `Timeline.relays`."""

    row: int
    start_s: float
    end_s: float
    version: int
    text: str


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas, learner and relays on one axis, in seconds since the first trajectory."""

    start_s: float
    end_s: float
    replicas: list[int]
    relays: list[str]
    trajectories: int
    shown: int  # of them, as bars
    most_running: float  # on one replica: mean of a bin
    heat: Heat
    bars: Bars
    moves: list[Move]
    steps: list[StepBar]
    marks: list[Mark]
    transfers: list[Transfer]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a quantity between edges [B + 1], and its percentiles p50, p95 and p99."""

    name: str
    unit: str
    log: bool
    edges: list[float]
    counts: list[int]
    percentiles: dict[str, float]
    total: int


class StalenessMap(msgspec.Struct, frozen=True):
    """How many trajectories steps [S] consumed at each staleness [V]; a column may be several steps."""

    steps: list[int]  # the first of each column
    per_column: int
    staleness: list[int]
    counts: list[list[int]]  # [V][S]


class Curves(msgspec.Struct, frozen=True):
    """Over seconds of RL."""

    rl_s: list[float]  # [S]
    reward: list[float]  # mean of what was scored since the point before; NaN where nothing was
    entropy: list[float]
    accuracy: list[tuple[float, float]]


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A relay or, as a leaf, a subscriber; times in seconds: medians, and of versions one by one."""

    name: str
    parent: str  # "" at the root, or where the record does not tell
    is_relay: bool
    versions: int
    median_s: float
    worst_s: float
    first_byte_s: float
    wire_share: float  # bytes that came, of those of the versions
    left_parent: int  # times
    recent: list[tuple[int, float, str]]  # (version, seconds, parent), the last ones


class DropKind(msgspec.Struct, frozen=True, kw_only=True):
    """All that were dropped for one reason."""

    reason: str
    count: int
    mean_length: float
    mean_reward: float | None
    examples: list[str]


class DropRow(msgspec.Struct, frozen=True, array_like=True):
    """One that was dropped."""

    id: str
    reason: str
    detail: str
    length: int
    reward: float | None
    replica: int | None
    at_s: float


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """All that a page shows of a run."""

    name: str
    seq: int
    live: bool  # as `Snapshot.live`
    heard_s: float  # when the last event was, seconds since 1970
    headline: list[Figure]
    wall: WallPanel | None
    timeline: Timeline
    distributions: list[Distribution]
    staleness: StalenessMap
    curves: Curves
    hops: list[Hop]
    stages: list[StageBar]
    step_s: float
    drops: list[DropKind]
    drop_rows: list[DropRow]
