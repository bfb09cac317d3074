"""Events: the only input of the ledger. Each record here is one row of the event log.

Events name trajectories, versions and parts of the run by id. They carry no tokens: the ledger has references.
"""

import msgspec
from msgspec import field

from laminar_py.records.credit import Earned, RoleCredit
from laminar_py.records.evaluations import SetFigures
from laminar_py.records.scoring import TermValue, answer_by
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, Kind


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=lambda name: name.lower()):
    """Base of all events; the tag is the class name in lower case."""


# The run and its parts


class RunStarted(Event, frozen=True, kw_only=True):
    """The controller started, e.g. `RunStarted(incarnation=2, resumed_step=40, ...)` from the checkpoint of step
    40."""

    incarnation: int  # counts starts of the controller
    host: str
    pid: int
    schema: int  # version of the ledger's schema
    config_digest: str
    drain: bool  # the run promises one version per trajectory
    max_staleness: int | None  # bound that is enforced at consumption; None: no bound
    resumed_step: int | None = None
    data: dict[str, str] = field(default_factory=dict)  # field of the config -> digest of the source's rows
    eval_sampling: dict[str, str] = field(default_factory=dict)  # by set, see `EvalConfig.sampling_by_set`
    simulated: bool = False  # a simulation: tokens are only counted, times are of a virtual clock


class RunEnded(Event, frozen=True):
    """The controller ended by itself, e.g. `RunEnded(2, "finished")` or `RunEnded(2, "interrupted")`."""

    incarnation: int
    reason: str


class Scaled(Event, frozen=True):
    """The replicas of the run from now on, e.g. `Scaled((0, 1, 4))`; replicas that are not named leave.

    It is on record at the start of each incarnation, whose replicas are numbered from 0, and at each change.
    """

    replicas: tuple[int, ...]
    servers: tuple[str, ...] = ()  # [replicas] that they attach to; empty: the run starts its engines


class ReplicaLeft(Event, frozen=True):
    """A replica that was to leave has no trajectories any more, and its process has ended, e.g.
    `ReplicaLeft(4)`."""

    replica: int
    reason: str = "scaled"  # or why it could not start


class PartStarted(Event, frozen=True):
    """A supervised part runs, e.g. `PartStarted("replica-1", 4711)`."""

    part: str
    pid: int


class PartCrashed(Event, frozen=True):
    """The supervisor found that a part crashed or hangs, e.g. `PartCrashed("replica-1", "exit code -9")`."""

    part: str
    reason: str


class SealBroken(Event, frozen=True):
    """A sealed run was resumed, e.g. `SealBroken(digest)`."""

    digest: str  # of the seal that holds no longer


# A trajectory, from its prompt to the learner


class Issued(Event, frozen=True, kw_only=True):
    """A trajectory exists from now on, e.g. sample 1 of group "g3":

    `Issued(trajectory_id="g3.1", group_id="g3", prompt_id="p7", prompt_index=3, sample_index=1, kind=Kind.TRAIN)`.
    """

    trajectory_id: str
    group_id: str
    prompt_id: str
    prompt_index: int  # place of its prompt in the stream
    sample_index: int
    kind: Kind


class Assigned(Event, frozen=True):
    """A replica generates it now, e.g. `Assigned("g3.1", 2, 1, 41)`."""

    trajectory_id: str
    replica: int
    epoch: int  # counts assignments of the trajectory
    length: int  # response tokens so far


class Interrupted(Event, frozen=True, kw_only=True):
    """Generation stopped early, e.g. `Interrupted(trajectory_id="g3.1", epoch=1, length=41,
    reason="new_weights")`."""

    trajectory_id: str
    epoch: int
    length: int  # response tokens so far
    reason: str  # new_weights, repacked, returned, replica_crashed, controller_crashed or version_lost
    used_s: float = 0.0  # seconds of generation so far, on all replicas, as last reported


class StreamLost(Event, frozen=True):
    """A stream broke off before the engine's last delta, e.g. `StreamLost("g3.1", 2, 41)`.

    Until the trajectory continues, two facts stay open: the exact token at which its version changed, and the
    experts that its tokens were routed to.
    """

    trajectory_id: str
    replica: int
    length: int  # response tokens so far


class Restamped(Event, frozen=True):
    """The engine's last delta corrected the token of a version's change, e.g. `Restamped("g3.1", spans)`."""

    trajectory_id: str
    spans: tuple[Span, ...]  # cover the whole response so far


class Cut(Event, frozen=True):
    """A cap ended it early, e.g. `Cut("g3.1", Cap.TOKENS, 1024.0)`."""

    trajectory_id: str
    cap: Cap
    value: float  # of the cap


class Finished(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Its response is complete, e.g. `Finished(trajectory_id="g3.1", epoch=1, length=441, spans=(Span(7, 0,
    441),), ...)`."""

    trajectory_id: str
    epoch: int
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # cover [0, length)
    length: int  # response tokens
    digest: str  # `codec.response_digest` of its pieces
    queue_s: float
    generate_s: float
    environment_s: float = 0.0  # seconds until its environment answered, with waits and transport


class Scored(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The reward is known, e.g. `Scored(trajectory_id="g3.1", reward=1.0, elapsed_s=0.2)`."""

    trajectory_id: str
    reward: float
    elapsed_s: float
    at_once: float = 1.0  # responses of this kind that its scorer works on at the same time
    terms: list[TermValue] = field(default_factory=list)  # the reward is their weighted sum
    earned: Earned | None = None  # summary of process rewards, if there are any
    roles: tuple[RoleCredit, ...] = ()  # rewards by role, if there are several

    @property
    def answer(self) -> str:
        """Answer that the response gives."""
        return answer_by(self.terms)


class Ready(Event, frozen=True, omit_defaults=True):
    """Its group is complete and the learner may train on it, e.g. `Ready("g3.1", 0.7)`."""

    trajectory_id: str
    advantage: float  # mean over roles, if there are several
    advantage_scale: float = 1.0  # advantage per unit of reward
    roles: tuple[RoleCredit, ...] = ()  # with their advantages


class Consumed(Event, frozen=True, kw_only=True):
    """The learner trained on it, e.g. `Consumed(trajectory_id="g3.1", step=9, version=8, staleness=1,
    weight=1.0)`."""

    trajectory_id: str
    step: int
    version: int  # of the learner before the step
    staleness: int
    weight: float  # factor on its loss


class Undone(Event, frozen=True):
    """A rollback undid the step that consumed it, so it is READY again, e.g. `Undone("g3.1", 9)`."""

    trajectory_id: str
    step: int


class Dropped(Event, frozen=True):
    """The learner will never train on it, e.g. `Dropped("g3.1", DropReason.REWARD_TIMEOUT, "math took 10 s")`."""

    trajectory_id: str
    reason: DropReason
    detail: str = ""


# Weight versions


class VersionPublished(Event, frozen=True, kw_only=True):
    """The learner published a version, e.g. `VersionPublished(version=8, step=8, incarnation=1, parent=7,
    ...)`."""

    version: int
    step: int
    incarnation: int
    parent: int | None  # version that its weights were trained from; None: the first
    digest: str
    num_bytes: int
    stall_s: float  # seconds that the learner stood still for it


class VersionLoaded(Event, frozen=True, kw_only=True):
    """A replica serves a version from now on, e.g. `VersionLoaded(replica=2, version=8, digest=digest,
    elapsed_s=0.8)`."""

    replica: int
    version: int
    digest: str
    elapsed_s: float
    checksum: str | None = None  # of the engine's tensors; None: not verified


class Relayed(Event, frozen=True, kw_only=True):
    """A relay holds a verified version, e.g. as a delta against version 7:

    `Relayed(node="relay-1", version=8, base=7, num_bytes=988_065_792, wire_bytes=31_457_280, ...)`. Seconds count
    from the relay's first request for it. At the root, which has it from the learner, they are 0.
    """

    node: str
    version: int
    digest: str
    num_bytes: int
    base: int | None  # version that it came as a delta against; None: it came in full
    wire_bytes: int  # received for it
    first_byte_s: float
    elapsed_s: float
    parent: str = ""  # node that it came from, the last one of several; "" at the root


class Pulled(Event, frozen=True):
    """A subscriber pulled a version from its host's relay, e.g. `Pulled("relay-1", "replica-1", 8, 0.4)`."""

    node: str
    subscriber: str
    version: int
    waited_s: float


class RelayGaveUp(Event, frozen=True):
    """A relay could not hold a version, e.g. `RelayGaveUp("relay-1", 8, "/dev/shm is full")`."""

    node: str
    version: int
    reason: str


class Reattached(Event, frozen=True):
    """A relay left its parent for another, e.g. `Reattached("relay-2", "tcp://10.0.0.4:7000",
    "tcp://10.0.0.5:7000")`."""

    node: str
    old: str  # endpoint
    new: str  # endpoint; equal to `old` if the relay has no other


class Repacked(Event, frozen=True, kw_only=True):
    """A round of repacking among the replicas of one version is done: every trajectory of its plan has moved.

    E.g. `Repacked(version=8, num_running=3, num_waiting=2, sources=(4,), prefill=1323, elapsed_s=0.1)`.
    """

    version: int
    num_running: int  # moved trajectories with response tokens
    num_waiting: int  # moved trajectories without
    sources: tuple[int, ...]  # replicas
    prefill: int  # tokens that the busiest destination prefills for `num_running`
    elapsed_s: float  # since its plan


# Learner steps, checkpoints and evaluations


class Stepped(Event, frozen=True, kw_only=True):
    """A learner step; it is committed together with the consumption of its trajectories.

    E.g. `Stepped(step=9, incarnation=1, num_trajectories=256, num_tokens=80_000, loss=0.1, grad_norm=0.4, ...)`.
    """

    step: int
    incarnation: int
    num_trajectories: int
    num_tokens: int
    loss: float
    grad_norm: float
    reward: float  # mean
    elapsed_s: float
    waited_s: float = 0.0  # seconds that the learner waited for the batch
    reference_s: float = 0.0  # of the reference model: in the learner, or as a stage since the last step


class StepSkipped(Event, frozen=True):
    """Updates of a step were not finite and changed nothing, e.g. `StepSkipped(9, 1, 1, ("g3.1",))`.

    The step consumes its trajectories all the same.
    """

    step: int
    incarnation: int
    num_updates: int
    trajectory_ids: tuple[str, ...]


class RefillStopped(Event, frozen=True, kw_only=True):
    """A step got fewer groups than it wanted, since too many groups had no signal.

    E.g. `RefillStopped(step=9, num_wanted=32, num_taken=20, num_without_signal=108, num_best=90, num_worst=18)`.
    """

    step: int
    num_wanted: int
    num_taken: int
    num_without_signal: int  # groups without signal
    num_best: int  # groups without signal in which all responses had the best reward of the run
    num_worst: int  # groups without signal in which all responses had the worst reward of the run
    only_reward: float | None = None  # the only reward of the run so far; then `num_best` and `num_worst` are 0

    def describe(self) -> str:
        """Text for a log: how many groups had no signal, and which share of these is solved or hopeless."""
        solved, hopeless = self.num_best / self.num_without_signal, self.num_worst / self.num_without_signal
        judged = f"{solved:.0%} are solved (all rewards the best of the run), {hopeless:.0%} hopeless (the worst)"
        if self.only_reward is not None:
            judged = f"every reward of the run is {self.only_reward:g}, so they are all solved or all hopeless"
        others = f"{self.num_without_signal} others had no signal"
        return f"{self.num_taken} of {self.num_wanted} groups; {others}: {judged}"


class Checkpointed(Event, frozen=True, kw_only=True):
    """A checkpoint is on disk, e.g. `Checkpointed(step=40, version=40, path="checkpoints/step-40", ...)`.

    Later steps may be on record before it, since it is written beside them.
    """

    step: int
    version: int
    path: str  # in the run folder
    stall_s: float  # seconds that the learner stood still
    elapsed_s: float  # seconds until all files were on disk


class RolledBack(Event, frozen=True):
    """The learner went back to a checkpoint and undid later steps, e.g. `RolledBack(40, "learner-0 crashed")`."""

    step: int  # of the checkpoint
    reason: str


class Evaluated(Event, frozen=True, kw_only=True):
    """An evaluation pass is complete, e.g. `Evaluated(pass_id="e4-aime", set_name="aime", version=40, ...)`.

    Its figures follow from the answers of the trajectories with `pass_id` as their group.
    """

    pass_id: str
    set_name: str
    version: int
    step: int  # that made the version
    rl_s: float  # seconds of the RL phase
    figures: SetFigures


AnyEvent = (
    RunStarted
    | Scaled
    | ReplicaLeft
    | RunEnded
    | Issued
    | Assigned
    | Interrupted
    | Finished
    | StreamLost
    | Restamped
    | Cut
    | Scored
    | Ready
    | Consumed
    | Undone
    | Dropped
    | VersionPublished
    | VersionLoaded
    | Repacked
    | Relayed
    | Pulled
    | RelayGaveUp
    | Reattached
    | Stepped
    | StepSkipped
    | RefillStopped
    | Checkpointed
    | RolledBack
    | SealBroken
    | PartStarted
    | PartCrashed
    | Evaluated
)
