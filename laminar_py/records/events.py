"""Events: the only input of the ledger. Every record here is one row of the event log.

Events name trajectories, versions and parts by id and carry no payload: of tokens the ledger has references.
"""

from msgspec import field

from laminar_py.records.evaluations import SetFigures
from laminar_py.records.event import Event as Event
from laminar_py.records.event import PartDied as PartDied
from laminar_py.records.event import PartStarted as PartStarted
from laminar_py.records.event import ReplicaLeft as ReplicaLeft
from laminar_py.records.event import Scaled as Scaled
from laminar_py.records.returns import Earned
from laminar_py.records.roles import RoleCredit
from laminar_py.records.scoring import TermValue, said_by
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, Kind


class RunStarted(Event, frozen=True, kw_only=True):
    """An incarnation of the controller began; `resumed_step` is the checkpoint it goes on from."""

    incarnation: int
    host: str
    pid: int
    schema: int
    config_digest: str
    drain: bool  # one version per trajectory is promised
    max_staleness: int | None  # bound that is enforced at consumption, None if there is none
    resumed_step: int | None = None
    data: dict[str, str] = field(
        default_factory=dict
    )  # digest of the rows of each source, by its field of the config
    eval_requests: dict[str, str] = field(default_factory=dict)  # by set, see `EvalConfig.requests`
    simulated: bool = False  # nothing is generated or trained: tokens are counts, times are of a virtual clock


class RunEnded(Event, frozen=True):
    """The incarnation ended by itself: `finished` or `interrupted`."""

    incarnation: int
    reason: str


class Issued(Event, frozen=True, kw_only=True):
    """A trajectory exists from here on. `prompt_index` is its prompt's place in the stream."""

    trajectory_id: str
    group_id: str
    prompt_id: str
    prompt_index: int
    sample_index: int
    kind: Kind


class TokensLost(Event, frozen=True, kw_only=True):
    """Tokens or columns of these trajectories can be read no more, and are in no archive."""

    trajectory_ids: tuple[str, ...]
    reason: str


class Assigned(Event, frozen=True):
    """A replica owns it now, under `epoch`; `length` response tokens went along."""

    trajectory_id: str
    replica: int
    epoch: int
    length: int


class Interrupted(Event, frozen=True, kw_only=True):
    """Generation stopped at `length` tokens: `new_weights`, `replica_died`, `controller_died`, `stopped`."""

    trajectory_id: str
    epoch: int
    length: int
    reason: str
    used_s: float = 0.0  # of generation until then, on all replicas, as last reported


class Finished(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The engine ended it. `digest` is `digests.response_digest` of its pieces."""

    trajectory_id: str
    epoch: int
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    length: int
    digest: str
    queue_s: float
    generate_s: float
    environment_s: float = 0.0  # that its environment worked


class StreamCut(Event, frozen=True):
    """A stream on `replica` broke off at `length` tokens, before the engine's last word.

    The place of a change of version under it is what the stream had said, and the experts that its tokens were
    routed to are unknown until it goes on.
    """

    trajectory_id: str
    replica: int
    length: int


class Restamped(Event, frozen=True):
    """The engine's last word moved a change of version; `spans` cover the whole response so far, and hold."""

    trajectory_id: str
    spans: tuple[Span, ...]


class Cut(Event, frozen=True):
    """A cap ended it early, and the cap's value."""

    trajectory_id: str
    cap: Cap
    value: float


class Scored(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The reward of a trajectory is known, and of which terms it is the sum."""

    trajectory_id: str
    reward: float
    elapsed_s: float
    at_once: float = 1.0  # responses like this one that its scorer works on at the same time
    terms: list[TermValue] = field(default_factory=list)
    earned: Earned | None = None  # where its tokens have rewards of their own
    roles: tuple[RoleCredit, ...] = ()  # where these have rewards of their own

    @property
    def said(self) -> str:
        """Answer that the response gives."""
        return said_by(self.terms)


class Ready(Event, frozen=True, omit_defaults=True):
    """A group is complete, and its trajectory may be trained on."""

    trajectory_id: str
    advantage: float  # the mean of those of its roles, where it has several
    advantage_scale: float = 1.0  # what a unit of reward is in it
    roles: tuple[RoleCredit, ...] = ()  # with their advantages


class Consumed(Event, frozen=True, kw_only=True):
    """Learner step `step`, at learner version `version`, trained on it."""

    trajectory_id: str
    step: int
    version: int
    staleness: int
    weight: float


class Undone(Event, frozen=True):
    """The step that consumed it lies after the checkpoint the run went back to; it is READY again."""

    trajectory_id: str
    step: int


class Dropped(Event, frozen=True):
    """A trajectory will never be trained on, and why."""

    trajectory_id: str
    reason: DropReason
    detail: str = ""


class VersionPublished(Event, frozen=True, kw_only=True):
    """The learner published `version` after `step`; `parent` is the version its weights came from."""

    version: int
    step: int
    incarnation: int
    parent: int | None
    digest: str
    num_bytes: int
    stall_s: float


class VersionLoaded(Event, frozen=True, kw_only=True):
    """A replica serves `version` from here on; `checksum` is of the engine's tensors, where they were verified."""

    replica: int
    version: int
    digest: str
    elapsed_s: float
    checksum: str | None = None


class Repacked(Event, frozen=True, kw_only=True):
    """A round of repacking among the replicas of `version`, from its plan until all that moved was handed over.

    `prefill` is the most tokens that one destination has to compute anew for those that had begun.
    """

    version: int
    num_running: int  # trajectories that moved with what they had
    num_waiting: int  # and those that had not begun
    sources: tuple[int, ...]
    prefill: int
    elapsed_s: float


class Relayed(Event, frozen=True, kw_only=True):
    """A relay holds a verified version, for which `wire_bytes` came; seconds count from its first request for it.

    The root holds what the learner wrote: nothing came, and all is 0.
    """

    node: str
    version: int
    digest: str
    num_bytes: int
    base: int | None  # version that it came as a delta against; None where it came in full
    wire_bytes: int
    first_byte_s: float
    elapsed_s: float
    parent: str = ""  # the node that it came from, last if from several; none at the root


class Pulled(Event, frozen=True):
    """A subscriber, e.g. `replica-1`, has got a version from the relay of its host, `waited_s` after it asked."""

    node: str
    subscriber: str
    version: int
    waited_s: float


class RelayGaveUp(Event, frozen=True):
    """A relay could not hold a version."""

    node: str
    version: int
    reason: str


class Reattached(Event, frozen=True):
    """A relay left the parent at endpoint `old` for the one at `new`; the same, if it has no other."""

    node: str
    old: str
    new: str


class Stepped(Event, frozen=True, kw_only=True):
    """A learner step, committed together with the consumption of its trajectories."""

    step: int
    incarnation: int
    num_trajectories: int
    num_tokens: int
    loss: float
    grad_norm: float
    reward: float
    elapsed_s: float
    waited_s: float = 0.0  # before it, for a batch
    reference_s: float = 0.0  # of the reference model: in the learner, or as a stage since the last step


class StepSkipped(Event, frozen=True):
    """So many updates of `step` were not finite and changed nothing; its trajectories are consumed anyway."""

    step: int
    incarnation: int
    num_updates: int
    trajectory_ids: tuple[str, ...]


class RefillStopped(Event, frozen=True, kw_only=True):
    """Step `step` was given `num_taken` groups and not `num_wanted`: `num_silent` in their places had no signal.

    Of these, `num_best` had the best reward of the run in all responses, `num_worst` the worst. Where every reward
    of the run so far is `only_reward` nobody can tell them apart, and both are 0.
    """

    step: int
    num_wanted: int
    num_taken: int
    num_silent: int
    num_best: int
    num_worst: int
    only_reward: float | None = None

    def tell(self) -> str:
        """Words for a log: how much of the task is solved, and how much hopeless."""
        solved, hopeless = self.num_best / self.num_silent, self.num_worst / self.num_silent
        judged = f"{solved:.0%} are solved (all rewards the best of the run), {hopeless:.0%} hopeless (the worst)"
        if self.only_reward is not None:
            judged = f"every reward of the run is {self.only_reward:g}, so they are all solved or all hopeless"
        return f"{self.num_taken} of {self.num_wanted} groups; {self.num_silent} others had no signal: {judged}"


class Checkpointed(Event, frozen=True, kw_only=True):
    """Step `step` is on disk at `path`, relative to the run folder; later steps may have come before this."""

    step: int
    version: int
    path: str
    stall_s: float  # until the learner could go on
    elapsed_s: float  # until all was on disk


class RolledBack(Event, frozen=True):
    """The learner went back to the checkpoint of `step`; later steps count for nothing."""

    step: int
    reason: str


class Archived(Event, frozen=True):
    """Responses of so many trajectories stand in a file of Parquet, `path` in the run folder, for good."""

    path: str
    num_trajectories: int
    num_bytes: int
    digest: str


class SealBroken(Event, frozen=True):
    """A sealed run goes on; `digest` is of the seal that no longer holds."""

    digest: str


class Evaluated(Event, frozen=True, kw_only=True):
    """Figures of a set's pass under `version`, which came from `step`, `rl_s` seconds into the RL phase.

    They follow from the answers of the trajectories whose group is `pass_id`.
    """

    pass_id: str
    set_name: str
    version: int
    step: int
    rl_s: float
    figures: SetFigures


AnyEvent = (
    RunStarted
    | Scaled
    | ReplicaLeft
    | RunEnded
    | Issued
    | TokensLost
    | Assigned
    | Interrupted
    | Finished
    | StreamCut
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
    | Archived
    | SealBroken
    | PartStarted
    | PartDied
    | Evaluated
)
