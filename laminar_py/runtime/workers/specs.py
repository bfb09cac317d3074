"""Requests with which the controller starts and calls the parts of a run, and their answers. Typed records."""

import msgspec

from laminar_py.config.tracking import Opening
from laminar_py.learner.packing.packer import StepWeights
from laminar_py.records.codec import IntArray
from laminar_py.records.columns import Source
from laminar_py.records.metrics import StepMetrics
from laminar_py.records.pieces import ColumnRef
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import TrajectoryRef
from laminar_py.relay.messages import RelayKeys


class PartStart(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the requests that start a part of a run."""

    config: str  # RunConfig as JSON
    run_dir: str


class WriterStart(PartStart, frozen=True, kw_only=True):
    """Base of the requests that start a part that writes segments."""

    label: str  # of its segments


class RelaySpec(PartStart, frozen=True, kw_only=True):
    """Start of a relay node, e.g. node 0 (the root) of 3; parents and sources in order of preference."""

    node: int
    store: str
    host: str  # address that it listens on
    parents: tuple[str, ...]  # endpoints; empty for the root
    sources: tuple[str, ...]  # endpoints of other nodes that may send chunks to a late node
    chunk_bytes: int  # of the whole tree
    keys: RelayKeys


class ReportPace(msgspec.Struct, frozen=True):
    """How often a replica reports: news gathers for `gather_s`; without news reports leave every `quiet_s`."""

    gather_s: float
    quiet_s: float


class ReplicaSpec(WriterStart, frozen=True, kw_only=True):
    """Start of a replica; `assignments` are interrupted trajectories that it continues first."""

    index: int
    model_dir: str
    relay: str  # endpoint
    hub: str  # endpoint for reports
    pace: ReportPace
    keys: RelayKeys
    assignments: list[Assignment] = []
    probes: list[IntArray] = []  # prompts after which its engine draws a token with each version
    secret: str | None = None  # of its engine
    server: str = ""  # URL that it attaches to; empty if it starts its engine
    shared: bool = False  # it takes turns with the learner
    shared_gpus: str = ""  # of learner ranks, as CUDA_VISIBLE_DEVICES names them; empty if it shares none


class LearnerSpec(PartStart, frozen=True, kw_only=True):
    """Start of a learner rank; `checkpoint` is the folder to continue from."""

    rank: int
    rendezvous: str  # file or tcp://ip:port
    store: str  # the root relay's
    chunk_bytes: int  # of a version
    ranks_here: int  # ranks on its node, with itself
    writers: int = 1  # the first ranks, as far as they share rank 0's node and a copy: they write versions
    probes: list[IntArray] = []  # prompts after which it gives its distribution with each version
    checkpoint: str | None = None


class WeightsSpec(PartStart, frozen=True, kw_only=True):
    """Publication of the model in `model.path` as version 0, for an evaluation without a learner."""

    store: str  # the root relay's
    chunk_bytes: int


class FetchRequest(msgspec.Struct, frozen=True):
    """A rank's trajectories of the next step: the rank reads the tokens, and returns why trajectories are lost."""

    bundles: list[list[TrajectoryRef]]  # one for each microbatch


class StepRequest(msgspec.Struct, frozen=True):
    """Optimizer step on the fetched trajectories; the weights are published as `version`, if set."""

    terms: StepWeights
    version: int | None = None


class StepOutcome(msgspec.Struct, frozen=True):
    """Result of a step."""

    metrics: StepMetrics
    version: int | None  # number under which the new weights are published
    stall_s: float  # seconds that the learner stood still for the publication


class ScorerSpec(WriterStart, frozen=True, kw_only=True):
    """Start of a scoring process."""

    index: int


class EnvironmentSpec(PartStart, frozen=True, kw_only=True):
    """Start of an environment process; with `messages` the chat template renders observations."""

    index: int
    messages: bool
    host: str  # address for streamed turns
    keys: RelayKeys


class ServerStart(PartStart, frozen=True, kw_only=True):
    """Start of a server for terms of the reward."""

    pool: str
    index: int  # in its pool
    host: str  # address that it listens on


class FrozenSpec(WriterStart, frozen=True, kw_only=True):
    """Start of a process for a frozen model, e.g. the teacher; `secret` is the key of its server, if any."""

    source: Source
    rendezvous: str  # a file that does not exist yet, for a group of one
    secret: str | None = None


class FrozenRequest(msgspec.Struct, frozen=True):
    """Trajectories of one packed batch for a frozen model."""

    trajectories: list[TrajectoryRef]


class FrozenAnswer(msgspec.Struct, frozen=True):
    """Where the log-probabilities of a batch under a frozen model are stored."""

    logprobs: dict[str, ColumnRef]  # by trajectory
    lost: dict[str, str]  # lost trajectory -> reason
    elapsed_s: float
    fingerprint: str = ""  # over sampled weights, or what a server says of its model


class TrackerSpec(msgspec.Struct, frozen=True):
    """Start of a tracker's process."""

    opening: Opening
    environment: dict[str, str]  # the controller's variables, with addresses and credentials of servers
