"""Events: the only input of the ledger. Each event is one row of the event log.

Events name trajectories, versions and parts of the run by id. They carry no tokens: the ledger has references.
"""

import msgspec
from msgspec import field

from laminar_py.records.credit import Earned, RoleCredit
from laminar_py.records.evaluations import SetFigures
from laminar_py.records.host import counted
from laminar_py.records.scoring import TermValue, answer_by
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, Kind


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=lambda name: name.lower()):
    """Base of all events; the tag is the class name in lower case."""


# The run and its parts


class RunStarted(Event, frozen=True, kw_only=True):
    """The controller started, e.g. from a checkpoint: `RunStarted(incarnation=2, resumed_step=40, ...)`."""

    incarnation: int  # counts starts of the controller
    host: str
    pid: int
    schema: int  # version of the ledger's schema
    config_digest: str
    drain: bool  # True: each trajectory has one version
    max_staleness: int | None  # bound on the staleness of consumed trajectories; None: no bound
    resumed_step: int | None = None  # step of the checkpoint that it started from; None: no checkpoint
    data: dict[str, str] = field(default_factory=dict)  # setting that names a source -> digest of its rows
    eval_sampling: dict[str, str] = field(default_factory=dict)  # by set, see `EvalConfig.sampling_by_set`
    simulated: bool = False  # a simulation: tokens are only counted, times are of a virtual clock
    overrides: tuple[str, ...] = ()  # settings that a resume changed, e.g. ("steps=8",)
    command_s: float | None = None  # seconds since its process started; None: not known
    replay_max_age: int | None = None  # bound on the staleness of replayed trajectories; None: no replay


class RunEnded(Event, frozen=True):
    """The controller ended without a crash, e.g. `RunEnded(2, "finished")` or `RunEnded(2, "interrupted")`."""

    incarnation: int
    reason: str


class Scaled(Event, frozen=True):
    """The replicas of the run from now on, e.g. `Scaled((0, 1, 4))`; replicas that are not named leave.

    The log has this event at the start of each incarnation, which numbers its replicas from 0, and at each change.
    """

    replicas: tuple[int, ...]
    servers: tuple[str, ...] = ()  # [replicas] servers to which they attach; empty: the run starts its engines


class SettingChanged(Event, frozen=True, kw_only=True):
    """A setting of the running run has another value from the next batch of the learner on, e.g.

    `SettingChanged(step=40, name="staleness.max_staleness", value=5, by="control", reason="the learner waits
    ...")`. A change of the fleet is `Scaled`.
    """

    step: int  # learner steps done
    name: str
    value: int
    by: str  # "user" or "control" (`staleness.control`)
    reason: str = ""

    def describe(self) -> str:
        """Text for a report, e.g. "staleness.max_staleness=5 by control, since the learner waits ..."."""
        return f"{self.name}={self.value} by {self.by}" + (f", since {self.reason}" if self.reason else "")


class Unquantized(Event, frozen=True, kw_only=True):
    """Engines that round weights (`rollout.engine.quantization`) differed from the learner by more than
    `rollout.engine.max_mismatch`, so all replicas start again and serve the weights as published.

    A response under way continues under the version that it has, whose tokens so far were of rounded weights; each
    token keeps the log-probability with which it was drawn.

    E.g. `Unquantized(step=12, mismatch=0.31, where="fresh tokens of step 12")`.
    """

    step: int  # of the learner
    mismatch: float  # mean difference of a token's log-probability, nats
    where: str

    def describe(self) -> str:
        """Text for a line or a report, e.g. "replicas serve unquantised weights from now on, since ..."."""
        return (
            f"replicas serve unquantised weights from now on, since log-probabilities of {self.where} differ by"
            f" {self.mismatch:.3g} nats in the mean between engines and learner"
        )


class ReplicaLeft(Event, frozen=True):
    """A leaving replica has no trajectories any more, and its process has ended, e.g. `ReplicaLeft(4)`."""

    replica: int
    reason: str = "scaled"  # or why the replica could not start


class PartStarted(Event, frozen=True):
    """A keeper has started a process of the run, e.g. `PartStarted("replica-1", 4711)`."""

    part: str
    pid: int


class PartCrashed(Event, frozen=True):
    """A keeper found that its process crashed or hangs, e.g. `PartCrashed("replica-1", "exit code -9")`."""

    part: str
    reason: str


class Leased(Event, frozen=True, kw_only=True):
    """Shared devices changed hands, e.g. `Leased(holder="learner", step=7, elapsed_s=0.2, tokens=90_000)`."""

    holder: str  # from now on: "learner" or "replicas"
    step: int  # steps that the learner has made
    elapsed_s: float  # until all shared replicas stood, or until released caches were complete again
    tokens: int  # of responses under way on the shared replicas


class SealBroken(Event, frozen=True):
    """A sealed run was resumed, so its seal is invalid, e.g. `SealBroken(digest)`."""

    digest: str  # of the seal


# A trajectory, from its prompt to the learner


class Issued(Event, frozen=True, kw_only=True):
    """The controller created a trajectory, e.g. sample 1 of group "g3":

    `Issued(trajectory_id="g3.1", group_id="g3", prompt_id="p7", prompt_index=3, sample_index=1, kind=Kind.TRAIN)`.
    """

    trajectory_id: str
    group_id: str
    prompt_id: str
    prompt_index: int  # place of its prompt in the stream
    sample_index: int
    kind: Kind


class Assigned(Event, frozen=True):
    """The controller assigned a trajectory to a replica, e.g. `Assigned("g3.1", 2, 1, 41)`."""

    trajectory_id: str
    replica: int
    epoch: int  # counts assignments of the trajectory
    length: int  # response tokens so far


class Interrupted(Event, frozen=True, kw_only=True):
    """A trajectory's generation stopped before its end; an assignment may resume it.

    E.g. `Interrupted(trajectory_id="g3.1", epoch=1, length=41, reason="new_weights")`.
    """

    trajectory_id: str
    epoch: int
    length: int  # response tokens so far
    reason: str  # new_weights, repacked, returned, replica_crashed, controller_crashed or version_lost
    used_s: float = 0.0  # seconds of generation so far, on all replicas, as last reported


class StreamLost(Event, frozen=True):
    """A stream broke off before the engine's last delta, e.g. `StreamLost("g3.1", 2, 41)`.

    The last delta would have had the exact token at which the version changed, and the experts of the tokens. So
    both are unknown until the trajectory continues.
    """

    trajectory_id: str
    replica: int
    length: int  # response tokens so far


class Restamped(Event, frozen=True):
    """The engine's last delta corrected the tokens at which versions changed, e.g. `Restamped("g3.1", spans)`."""

    trajectory_id: str
    spans: tuple[Span, ...]  # cover the whole response so far


class Cut(Event, frozen=True):
    """A cap ended a trajectory early, e.g. `Cut("g3.1", Cap.TOKENS, 1024.0)`."""

    trajectory_id: str
    cap: Cap
    value: float  # limit of the cap, in tokens, seconds or turns


class Finished(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A trajectory's response is complete, e.g. with 441 tokens under version 7:

    `Finished(trajectory_id="g3.1", epoch=1, length=441, spans=(Span(7, 0, 441),), ...)`.
    """

    trajectory_id: str
    epoch: int
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # cover [0, length)
    length: int  # response tokens
    digest: str  # `codec.response_digest` of its pieces
    queue_s: float  # seconds from arrival at a replica to the first tokens
    generate_s: float  # seconds at replicas
    environment_s: float = 0.0  # seconds of waiting for its environment, including queues and transport


class Scored(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A scorer returned a trajectory's reward, e.g. `Scored(trajectory_id="g3.1", reward=1.0, elapsed_s=0.2)`."""

    trajectory_id: str
    reward: float
    elapsed_s: float
    at_once: float = 1.0  # responses of this kind that its scorer works on at the same time
    terms: list[TermValue] = field(default_factory=list)  # the reward is their weighted sum
    earned: Earned | None = None  # summary of process rewards, if there are any
    roles: tuple[RoleCredit, ...] = ()  # rewards by role, if there are several

    @property
    def answer(self) -> str:
        """Answer that the response gives, for majority votes; "" if no term names an answer."""
        return answer_by(self.terms)

    @property
    def term_values(self) -> dict[str, float]:
        """Value of each term by its name."""
        return {term.name: term.value for term in self.terms}


class Ready(Event, frozen=True, omit_defaults=True):
    """A trajectory's group is complete, and the learner may train on the trajectory, e.g. `Ready("g3.1", 0.7)`."""

    trajectory_id: str
    advantage: float  # mean over roles, if there are several
    advantage_scale: float = 1.0  # advantage per unit of reward
    roles: tuple[RoleCredit, ...] = ()  # with their advantages


class Consumed(Event, frozen=True, kw_only=True):
    """The learner trained on a trajectory, e.g. `Consumed(trajectory_id="g3.1", step=9, version=8, ...)`."""

    trajectory_id: str
    step: int
    version: int  # of the learner before the step
    staleness: int
    weight: float  # factor on the trajectory's loss


class Replayed(Event, frozen=True, kw_only=True):
    """The learner trained on a trajectory again that an earlier step consumed; a `RolledBack` undoes that, too.

    E.g. `Replayed(trajectory_id="g3.1", step=12, version=11, staleness=5, weight=1.0)`.
    """

    trajectory_id: str
    step: int
    version: int  # of the learner before the step
    staleness: int
    weight: float  # factor on the trajectory's loss


class Undone(Event, frozen=True):
    """A rollback undid the step that consumed a trajectory, which is READY again, e.g. `Undone("g3.1", 9)`."""

    trajectory_id: str
    step: int


class Dropped(Event, frozen=True):
    """The learner will never train on a trajectory, e.g. `Dropped("g3.1", DropReason.REWARD_TIMEOUT, "10 s")`."""

    trajectory_id: str
    reason: DropReason
    detail: str = ""


# Weight versions


class VersionPublished(Event, frozen=True, kw_only=True):
    """The learner published a version, e.g. `VersionPublished(version=8, step=8, parent=7, ...)`."""

    version: int
    step: int  # that made the weights
    incarnation: int
    parent: int | None  # version that its weights were trained from; None: the first version
    digest: str
    num_bytes: int
    stall_s: float  # seconds that the learner waited for the publish


class VersionLoaded(Event, frozen=True, kw_only=True):
    """A replica has loaded a version and serves it, e.g. `VersionLoaded(replica=2, version=8, ...)`."""

    replica: int
    version: int
    digest: str
    elapsed_s: float
    base: int | None = None  # version that the engine changed into this one; None: it loaded the whole version
    checksum: str | None = None  # of the engine's tensors; None: not verified
    quantized: bool = False  # the engine rounded the published tensors before the checksum
    stale: tuple[str, ...] = ()  # tensors of the engine that did not follow the published ones, or not exactly


class Relayed(Event, frozen=True, kw_only=True):
    """A relay has received and verified a version, e.g. as a delta against version 7:

    `Relayed(node="relay-1", version=8, base=7, num_bytes=988_065_792, wire_bytes=31_457_280, ...)`. Seconds count
    from the relay's first request for the version. At the root, where the learner writes the version, they are 0.
    """

    node: str
    version: int
    digest: str
    num_bytes: int
    base: int | None  # base version of the delta that the relay received; None: it received the whole version
    wire_bytes: int  # bytes that it received
    first_byte_s: float
    elapsed_s: float
    parent: str = ""  # node that sent the version, the last parent if there were several; "" at the root
    other_bytes: int = 0  # of `wire_bytes`, from other nodes than the parent: the relay joined late


class Pulled(Event, frozen=True):
    """A subscriber pulled a version from its host's relay, e.g. `Pulled("relay-1", "replica-1", 8, 0.4)`."""

    node: str  # the relay
    subscriber: str
    version: int
    waited_s: float  # seconds from the request to the version


class RelayGaveUp(Event, frozen=True):
    """A relay could not hold a version, e.g. `RelayGaveUp("relay-1", 8, "/dev/shm is full")`."""

    node: str
    version: int
    reason: str


class Reattached(Event, frozen=True):
    """A relay changed its parent, e.g. `Reattached("relay-2", "tcp://10.0.0.4:7000", "tcp://10.0.0.5:7000")`."""

    node: str  # the relay
    old: str  # endpoint of the old parent
    new: str  # endpoint of the new parent; equal to `old` if the relay has no other


class Repacked(Event, frozen=True, kw_only=True):
    """A round of repacking among the replicas of one version is complete: each trajectory of the plan has moved.

    E.g. `Repacked(version=8, num_running=3, num_waiting=2, sources=(4,), prefill=1323, elapsed_s=0.1)`.
    """

    version: int
    num_running: int  # moved trajectories with response tokens
    num_waiting: int  # moved trajectories without response tokens
    sources: tuple[int, ...]  # replicas that gave trajectories away
    prefill: int  # tokens that the busiest destination prefills for the `num_running` trajectories
    elapsed_s: float  # since the plan


# Learner steps, checkpoints and evaluations


class LearnerLoaded(Event, frozen=True):
    """The learner's ranks have loaded the model, e.g. `LearnerLoaded("varlen", ("flash2: it raised ...",))`."""

    attention: str  # the attention kernel of rank 0
    refused: tuple[str, ...] = ()  # kernels that failed their check, each with the reason


class FrozenLoaded(Event, frozen=True):
    """A frozen model runs beside the learner, e.g. `FrozenLoaded("teacher", "models/better", "5fd1")`."""

    source: str  # "reference" or "teacher"
    model: str  # folder or address in the config; "" for the model that RL begins with
    fingerprint: str  # over sampled weights, or what a server says of its model


class Stepped(Event, frozen=True, kw_only=True):
    """The learner made a step. The ledger commits this event together with the step's `Consumed` and `Replayed`
    events.

    E.g. `Stepped(step=9, incarnation=1, num_trajectories=256, num_tokens=80_000, loss=0.1, grad_norm=0.4, ...)`.
    """

    step: int
    incarnation: int
    num_trajectories: int  # replayed ones included
    num_tokens: int
    loss: float | None  # None: the step trained nothing
    grad_norm: float | None  # None: the same
    reward: float | None  # mean over trajectories scored since the last step; None without any
    elapsed_s: float
    waited_s: float = 0.0  # seconds that the learner waited for the batch
    reference_s: float = 0.0  # seconds of frozen models: in this step, or as a stage since the last step


class StepSkipped(Event, frozen=True):
    """Updates of a step had a loss or gradient that was not finite, e.g. `StepSkipped(9, 1, 1, ("g3.1",))`.

    These updates changed no weights, but the step consumed its trajectories.
    """

    step: int
    incarnation: int
    num_updates: int
    trajectory_ids: tuple[str, ...]


class Alarmed(Event, frozen=True):
    """A check found a silent failure, e.g. `Alarmed(9, "weights", "replica-1", "serves version 8 with ...")`."""

    step: int  # of the learner when the alarm came
    check: str  # field of the section `alarms`
    part: str
    message: str  # version and remedy included


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
        """Text for a log: how many groups had no signal, and which shares of them are solved and hopeless."""
        solved, hopeless = self.num_best / self.num_without_signal, self.num_worst / self.num_without_signal
        judged = f"{solved:.0%} are solved (all rewards the best of the run), {hopeless:.0%} hopeless (the worst)"
        if self.only_reward is not None:
            judged = f"every reward of the run is {self.only_reward:g}, so they are all solved or all hopeless"
        others = f"{counted(self.num_without_signal, 'other')} had no signal"
        return f"{self.num_taken} of {counted(self.num_wanted, 'group')}; {others}: {judged}"


class Checkpointed(Event, frozen=True, kw_only=True):
    """A checkpoint is on disk, e.g. `Checkpointed(step=40, version=40, path="checkpoints/step-40", ...)`.

    The log may have later steps before this event, since the learner trains while a thread writes the files.
    """

    step: int
    version: int
    path: str  # in the run folder
    stall_s: float  # seconds that the learner waited for the copy of its state
    elapsed_s: float  # seconds until all files were on disk


class RolledBack(Event, frozen=True):
    """The learner returned to a checkpoint and undid later steps, e.g. `RolledBack(40, "learner-0 crashed")`."""

    step: int  # of the checkpoint
    reason: str


class Evaluated(Event, frozen=True, kw_only=True):
    """An evaluation pass is complete, e.g. `Evaluated(pass_id="e4-aime", set_name="aime", version=40, ...)`.

    The figures follow from the trajectories whose `group_id` is `pass_id`.
    """

    pass_id: str
    set_name: str
    version: int
    step: int  # that made the version
    rl_s: float  # seconds of the RL phase so far
    figures: SetFigures


TrajectoryEvent = (
    Issued
    | Assigned
    | Interrupted
    | Finished
    | StreamLost
    | Restamped
    | Cut
    | Scored
    | Ready
    | Consumed
    | Replayed
    | Undone
    | Dropped
)
AnyEvent = (
    TrajectoryEvent
    | RunStarted
    | Scaled
    | SettingChanged
    | Unquantized
    | ReplicaLeft
    | RunEnded
    | VersionPublished
    | VersionLoaded
    | Repacked
    | Relayed
    | Pulled
    | RelayGaveUp
    | Reattached
    | LearnerLoaded
    | FrozenLoaded
    | Stepped
    | StepSkipped
    | Alarmed
    | RefillStopped
    | Checkpointed
    | RolledBack
    | SealBroken
    | Leased
    | PartStarted
    | PartCrashed
    | Evaluated
)
