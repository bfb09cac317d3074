"""State that the parts of `control` share: live trajectories and groups, replicas, moves, the phase of the run.

`Book` is owned by `control.scheduler` and decides nothing. Invariant (law 1): a trajectory is in `live` from its
issue until it is consumed or dropped, and each of these is recorded in the same call, so issued = consumed +
dropped + live; a group is in `groups` until its step is committed or nothing of it is left.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Protocol

import msgspec

from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.groups import Group
from laminar_py.control.moves import Moves
from laminar_py.control.settings import ControlSettings
from laminar_py.control.views import ReplicaViews
from laminar_py.ledger.machine import Machine
from laminar_py.ledger.trajectory import LiveTrajectory, issued
from laminar_py.records.ages import WeightAges
from laminar_py.records.engine import SamplingParams
from laminar_py.records.evaluations import set_of
from laminar_py.records.events import AnyEvent
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.spans import Span, sampled_versions
from laminar_py.records.trajectory import DropReason, Kind, Prompt


class Recorder(Protocol):
    """Destination of events and response pieces: the ledger, which applies each to its state as it takes it."""

    machine: Machine

    def append(self, event: AnyEvent) -> None:
        """Record an event."""
        ...

    def store_prompt(self, prompt: Prompt) -> None:
        """Keep a prompt's text and ids, once."""
        ...

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> None:
        """Keep where response tokens lie, which `spans` cover, with what was recorded beside them."""
        ...

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> None:
        """Keep where the columns lie that a finished response was scored with."""
        ...


class Phase(Enum):
    """Stages of a run, by the work that replicas get.

    RESTORING -> PAUSED (all is taken up) -> CONTINUING -> ADMITTING, and back as a schedule pauses; any -> ENDING.
    """

    ADMITTING = "admitting"  # new groups, and all that follows
    CONTINUING = "continuing"  # training that is live, and evaluations
    PAUSED = "paused"  # evaluations
    RESTORING = "restoring"  # nothing, until what a dead controller left is taken up
    ENDING = "ending"  # nothing

    @property
    def gives_nothing(self) -> bool:
        """True where replicas get nothing at all."""
        return self in (Phase.RESTORING, Phase.ENDING)


class Book:
    """Live trajectories and groups, what replicas have of them, and the recorder of their changes."""

    def __init__(self, settings: ControlSettings, recorder: Recorder) -> None:
        self.settings = settings
        self.recorder = recorder
        self.live = recorder.machine.live
        self.groups: dict[str, Group] = {}  # of training
        self.views = ReplicaViews(settings.replicas, sizes={1, settings.group_size})
        self.moves = Moves()
        self.aborts: dict[int, list[str]] = {}  # by replica: what it still runs of dropped trajectories
        self.phase = Phase.PAUSED
        self.newest_version = -1  # that the learner published
        self.ages = WeightAges()  # of versions; the one definition of staleness
        self.refilled: list[float] = []  # rewards of the groups without signal since the last step, if refilled
        self.rewards = (math.inf, -math.inf)  # the worst and the best so far
        self.next_prompt = 0  # place in the stream
        self.num_generating = 0  # groups that are not ready yet
        self.num_in_step = 0  # groups that the learner took for the step in hand
        self.num_missing = 0  # groups that this step wanted and did not get
        self.generated_tokens = 0  # of training, in this incarnation

    @property
    def at_ceiling(self) -> bool:
        """True where the next step is not full, and was given as many groups as it may be."""
        settings, batch = self.settings, self.settings.admission.batch
        num_ready = len(self.groups) - self.num_generating - self.num_in_step
        closed, most = len(self.refilled) + num_ready, settings.max_refill * batch
        return settings.without_signal is WithoutSignal.REFILL and num_ready < batch and closed >= most

    def record(self, event: AnyEvent) -> None:
        """Append an event; it changes the state of its trajectory."""
        self.recorder.append(event)

    def may_run(self, trajectory: LiveTrajectory) -> bool:
        """True where the phase lets a replica have it."""
        if trajectory.kind is Kind.EVAL:
            return not self.phase.gives_nothing
        return self.phase in (Phase.CONTINUING, Phase.ADMITTING)

    def issue(self, id: str, group_id: str, sample_index: int, prompt: Prompt, kind: Kind) -> LiveTrajectory:
        """A new trajectory, QUEUED."""
        self.record(issued(prompt, id=id, group_id=group_id, sample_index=sample_index, kind=kind))
        trajectory = self.live[id]
        trajectory.prompt = prompt
        return trajectory

    def issue_group(self, prompt: Prompt) -> list[LiveTrajectory]:
        """Issue a new group for the prompt at `next_prompt`; its samples, QUEUED."""
        group = Group(id=f"g{self.next_prompt}", prompt=prompt)
        self.next_prompt += 1
        self.groups[group.id] = group
        self.num_generating += 1
        self.recorder.store_prompt(prompt)
        return [self.issue_member(group) for _ in range(self.settings.group_size)]

    def issue_member(self, group: Group) -> LiveTrajectory:
        """The next sample of a group, e.g. "g3.8" in place of a lost one of 8."""
        index = group.next_sample
        group.next_sample += 1
        trajectory = self.issue(f"{group.id}.{index}", group.id, index, group.prompt, Kind.TRAIN)
        group.members[trajectory.id] = trajectory
        return trajectory

    def drop(self, members: Sequence[LiveTrajectory], reason: DropReason, detail: str = "") -> None:
        """End trajectories that will never be trained on."""
        for member in members:
            self.record(member.dropped(reason, detail))

    def abort(self, trajectory: LiveTrajectory) -> None:
        """Have the replica that runs a trajectory told to end it."""
        if trajectory.runs_on is not None:
            self.views.returned(trajectory.runs_on, trajectory.id)
            self.aborts.setdefault(trajectory.runs_on, []).append(trajectory.id)

    def take_aborts(self) -> dict[int, list[str]]:
        """Dropped trajectories that replicas still run, by replica; each is told once."""
        aborts, self.aborts = self.aborts, {}
        return aborts

    def sampling(self, trajectory: LiveTrajectory) -> SamplingParams:
        """Sampling of the run or of an evaluation's set, with a seed of the trajectory's own.

        An evaluation that is of no set is greedy.
        """
        sampling = self.settings.sampling
        if trajectory.kind is Kind.EVAL:
            greedy = msgspec.structs.replace(sampling, temperature=0.0)
            sampling = self.settings.of_sets.get(set_of(trajectory.group_id), greedy)
        return msgspec.structs.replace(sampling, seed=trajectory_seed(self.settings.seed, trajectory.id))

    def finished_beside(self, trajectory_id: str) -> Sequence[int]:
        """Response lengths of the finished samples of a trajectory's prompt."""
        trajectory = self.live.get(trajectory_id)
        group = None if trajectory is None else self.groups.get(trajectory.group_id)
        return () if group is None else group.finished_lengths

    def segments(self) -> set[str]:
        """Segments that hold tokens or columns of live trajectories."""
        return set().union(*(trajectory.segments for trajectory in self.live.values()))

    def versions_alive(self) -> int:
        """Number of distinct weight versions among live training trajectories."""
        versions, replicas = set[int](), set[int]()
        for trajectory in self.live.values():
            if trajectory.kind is Kind.TRAIN:
                versions.update(sampled_versions(trajectory.token_spans))
                if trajectory.runs_on is not None:
                    replicas.add(trajectory.runs_on)
        versions.update(self.views.by_index[replica].serving for replica in replicas)
        return len(versions - {-1})


def trajectory_seed(seed: int, trajectory_id: str) -> int:
    """A 63-bit sampling seed that depends on the run's seed and the trajectory alone."""
    digest = blake2b(f"{seed}/{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
