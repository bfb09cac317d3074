"""Panels of `report.html` as JSON, of which `web/*.js` reads the fields by name.

Invariant: everything is bounded, however long the run; where a bound leaves something out, the panel says so.
"""

import base64

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.observe.analytics.triage.remedies import Remedy
from laminar_py.observe.samples.records import PromptVisit, SampleRow, TokenSpan
from laminar_py.records.scoring import TermValue


class PackedArray(msgspec.Struct, frozen=True):
    """An array in base64, e.g. `PackedArray("uint32", "AQAAAA==")`, little-endian; None would be NaN."""

    type: str  # of the view that the page makes of it: uint8, uint16, uint32, int32, float32
    data: str


def pack(array: npt.NDArray[np.generic], kind: str) -> PackedArray:
    """`array` [n] as numbers of that type."""
    return PackedArray(kind, base64.b64encode(array.astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode())


class StageBar(msgspec.Struct, frozen=True, kw_only=True):
    """Stage of the mean step, which begins `start_s` into it, e.g. generation from 0 s on for 31.5 s, binding."""

    name: str
    start_s: float
    seconds: float
    binding: bool = False
    note: str = ""


class WallPanel(msgspec.Struct, frozen=True, kw_only=True):
    """Binding wall of the run, e.g. named "generation", with "replicas are busy 97% of the step" as evidence."""

    name: str
    meaning: str  # in a sentence, for those to whom the name says nothing
    evidence: tuple[str, ...]
    remedies: tuple[Remedy, ...]


class Figure(msgspec.Struct, frozen=True):
    """Number of the headline, e.g. `Figure("goodput", "8,102 tokens/s", "trained, per second of RL")`."""

    name: str
    value: str
    note: str = ""


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Mean number running and mean version [replicas x bins], of all trajectories, also those without a bar.

    Where they have environments: how many of those running are away, each at any moment by the share of its time.
    """

    start_s: float
    bin_s: float
    bins: int
    running: PackedArray
    version: PackedArray  # NaN where nothing ran
    away: PackedArray | None = None


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Stays [M] of trajectories [N] on replicas; times in milliseconds since `Timeline.start_s`."""

    of: PackedArray  # [M] place in what follows below
    replica: PackedArray  # place in `Timeline.replicas`
    version: PackedArray
    fate: PackedArray  # `stays.StayEnd`
    start: PackedArray
    end: PackedArray
    away: PackedArray | None = None  # share of it in environments; None: there are none
    ids: list[str]  # [N]
    length: PackedArray  # [N] as all that follow
    status: PackedArray  # place in `statuses`
    reward: PackedArray  # NaN: none
    staleness: PackedArray  # -1: none
    is_eval: PackedArray
    statuses: list[str]
    turns: PackedArray | None = None  # -1: not finished; None: there are no environments
    environment_s: PackedArray | None = None  # NaN: not finished


class MoveArrow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Move of `count` trajectories at once from one replica to another, as places in `Timeline.replicas`."""

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
    """Something at a moment, on `row`: a replica's place, or -1 for the learner."""

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
    most_running: float  # on one replica, of training: mean of a bin
    heat: Heat
    bars: Bars
    moves: list[MoveArrow]
    steps: list[StepBar]
    marks: list[Mark]
    transfers: list[Transfer]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a quantity between edges [B + 1], and its percentiles p50, p95 and p99."""

    name: str
    unit: str
    log: bool
    edges: list[float]
    counts: list[int]
    percentiles: dict[str, float]
    total: int


class StalenessMap(msgspec.Struct, frozen=True):
    """Trajectories that steps [S] consumed at each staleness [V]; a column may be several steps."""

    steps: list[int]  # the first of each column
    per_column: int
    staleness: list[int]
    counts: list[list[int]]  # [V][S]


class EvaluationCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward [E] of a set over seconds of RL, with the bounds of its interval."""

    name: str
    rl_s: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


class Curves(msgspec.Struct, frozen=True):
    """Curves over seconds of RL."""

    rl_s: list[float]  # [S]
    reward: list[float]  # mean of what was scored since the point before; NaN where nothing was
    entropy: list[float]
    evaluations: list[EvaluationCurve]


class LearnerCurves(msgspec.Struct, frozen=True, kw_only=True):
    """Figures [S] of learner steps; NaN where one is not known."""

    steps: list[int]
    loss: list[float]
    grad_norm: list[float]
    kl: list[float]  # nats, behaviour to new policy
    clipped: list[float]  # share of the tokens
    effective: list[float]  # effective sample size of the weights new / behaviour, of the tokens
    length: list[float]  # mean response tokens of what the step trained on


class RelayHop(msgspec.Struct, frozen=True, kw_only=True):
    """Relay or, as a leaf, subscriber; times in seconds: medians, and of versions one by one."""

    name: str
    parent: str  # "" at the root, or where the ledger does not tell
    is_relay: bool
    versions: int
    median_s: float
    worst_s: float
    first_byte_s: float = 0.0
    wire_share: float = 0.0  # bytes that came, of those of the versions
    left_parent: int = 0  # times
    recent: list[tuple[int, float, str]]  # (version, seconds, parent), the last ones


class DropKind(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories that were dropped for one reason, together."""

    reason: str
    count: int
    mean_length: float
    mean_reward: float | None
    examples: list[str]


class DroppedTrajectory(msgspec.Struct, frozen=True, array_like=True):
    """Row of the table of dropped trajectories, which leaves out those without signal."""

    id: str
    reason: str
    detail: str
    length: int
    reward: float | None
    replica: int | None
    at_s: float


class TextView(msgspec.Struct, frozen=True, kw_only=True):
    """Response as `FullSample` has it, but packed: L tokens, of which each kind stands once in `words`."""

    row: SampleRow
    prompt: str
    answer: str
    task: str
    ids_only: str
    words: list[tuple[int, str]]  # (id, text), each once
    places: PackedArray  # [L] in `words`
    logprobs: PackedArray  # [L] NaN where not known
    spans: list[TokenSpan]
    terms: list[TermValue]
    columns: dict[str, PackedArray]  # numbers per token by name, each [L]
    siblings: list[SampleRow]
    history: list[PromptVisit]
    visits: int  # of which `history` shows at most `texts.MOST_VISITS`
    lost: str = ""


class TextList(msgspec.Struct, frozen=True):
    """Rows of a list, and how many trajectories pass its filters."""

    rows: list[SampleRow]
    matching: int


class EmbeddedTexts(msgspec.Struct, frozen=True):
    """Texts that are in the page itself, each a `TextView`, and the error that kept others out, if one did."""

    samples: list[msgspec.Raw]
    trouble: str = ""


class TextsPanel(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the model wrote: the texts that are here, or None where the server is asked for them."""

    total: int  # trajectories of the run
    command: str  # that shows all of them
    choices: dict[str, list[str]]  # values of a filter, by its name
    here: EmbeddedTexts | None


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a page shows of a run."""

    name: str
    seq: int
    live: bool  # as `History.live`
    heard_s: float  # when the last event was, seconds since 1970
    headline: list[Figure]
    wall: WallPanel | None
    timeline: Timeline
    distributions: list[Histogram]
    staleness: StalenessMap
    curves: Curves
    learner: LearnerCurves
    texts: TextsPanel
    hops: list[RelayHop]
    stages: list[StageBar]
    step_s: float
    drops: list[DropKind]
    drop_rows: list[DroppedTrajectory]
    config: str  # as YAML; "" where the folder holds none
