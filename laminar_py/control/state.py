"""State that the parts of `control` share: live trajectories and groups, replicas, moves, the phase of the run.

`control.scheduler` owns the `ControlState`, which decides nothing. A trajectory is in `live` from its issue until
it is consumed or dropped, and the same call records the event, so issued = consumed + dropped + live (law 1). A
group is in `groups` until its step is committed or its last member is dropped.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Protocol

import msgspec

from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.earlier import EarlierResponses
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
    """The scheduler's interface to the ledger, which stores events and token places, and updates `machine`."""

    machine: Machine

    def append(self, event: AnyEvent) -> None:
        """Record an event."""
        ...

    def store_prompt(self, prompt: Prompt) -> None:
        """Store a prompt's text and ids, unless they are stored already."""
        ...

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> None:
        """Store the place of response tokens, which `spans` cover, and of the columns recorded beside them."""
        ...

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> None:
        """Store the places of the columns that scoring gave a finished response."""
        ...


class Phase(Enum):
    """Phases of a run, by the work that replicas get.

    RESTORING -> PAUSED (restored) -> CONTINUING -> ADMITTING, and back when a schedule pauses; any -> ENDING.
    """

    ADMITTING = "admitting"  # new groups, live training, evaluations
    CONTINUING = "continuing"  # live training, evaluations
    PAUSED = "paused"  # evaluations
    RESTORING = "restoring"  # nothing, until the trajectories of a crashed controller are restored
    ENDING = "ending"  # nothing

    @property
    def gives_nothing(self) -> bool:
        """Whether replicas get no work at all."""
        return self in (Phase.RESTORING, Phase.ENDING)


class ControlState:
    """Live trajectories and groups, the controller's view of each replica, and the recorder of changes."""

    def __init__(self, settings: ControlSettings, recorder: Recorder) -> None:
        self.settings = settings
        self.recorder = recorder
        self.live = recorder.machine.live
        self.groups: dict[str, Group] = {}  # by id
        self.views = ReplicaViews(settings.replicas, sizes={1, settings.group_size})
        self.moves = Moves()
        self.aborts: dict[int, list[str]] = {}  # dropped trajectories that a replica still runs, by replica
        self.phase = Phase.PAUSED
        self.before_rl = True  # no group was issued by this controller, so no newer version comes
        self.newest_version = -1  # published by the learner
        self.ages = WeightAges()  # of weight versions; defines staleness
        self.earlier = EarlierResponses()  # filled if `settings.sends_earlier`
        self.refilled = list[float]()  # under `refill`: a reward of each group without signal since the last step
        self.rewards = (math.inf, -math.inf)  # the worst and the best so far
        self.next_prompt = 0  # place in the stream
        self.num_generating = 0  # groups that are not ready yet
        self.num_in_step = 0  # groups in the learner's current step
        self.num_missing = 0  # groups that the current step lacks
        self.generated_tokens = 0  # in training, since this controller started
        self.num_version_lost = 0  # training trajectories that lost their version, since this controller started

    @property
    def refill_exhausted(self) -> bool:
        """Whether the next step lacks ready groups although `rollout.max_refill` times its groups have closed."""
        settings, batch = self.settings, self.settings.admission.batch
        num_ready = len(self.groups) - self.num_generating - self.num_in_step
        closed, most = len(self.refilled) + num_ready, settings.max_refill * batch
        return settings.without_signal is WithoutSignal.REFILL and num_ready < batch and closed >= most

    def record(self, event: AnyEvent) -> None:
        """Append an event to the ledger, which also applies it to the live trajectories."""
        self.recorder.append(event)

    def may_run(self, trajectory: LiveTrajectory) -> bool:
        """Whether the phase lets a replica run a trajectory."""
        if trajectory.kind is Kind.EVAL:
            return not self.phase.gives_nothing
        return self.phase in (Phase.CONTINUING, Phase.ADMITTING)

    def issue(self, id: str, group_id: str, sample_index: int, prompt: Prompt, kind: Kind) -> LiveTrajectory:
        """Record a new trajectory and return it, QUEUED."""
        self.record(issued(prompt, id=id, group_id=group_id, sample_index=sample_index, kind=kind))
        trajectory = self.live[id]
        trajectory.prompt = prompt
        return trajectory

    def issue_group(self, prompt: Prompt) -> list[LiveTrajectory]:
        """Issue a group for `prompt`, the prompt at `next_prompt` in the stream; return its members, QUEUED."""
        group = Group(id=f"g{self.next_prompt}", prompt=prompt)
        self.next_prompt += 1
        self.groups[group.id] = group
        self.num_generating += 1
        self.recorder.store_prompt(prompt)
        return [self.issue_member(group) for _ in range(self.settings.group_size)]

    def issue_member(self, group: Group) -> LiveTrajectory:
        """Issue the next sample of a group, e.g. "g3.8" to replace a lost sample of 8."""
        index = group.next_sample
        group.next_sample += 1
        trajectory = self.issue(f"{group.id}.{index}", group.id, index, group.prompt, Kind.TRAIN)
        group.members[trajectory.id] = trajectory
        return trajectory

    def drop(self, members: Sequence[LiveTrajectory], reason: DropReason, detail: str = "") -> None:
        """Record that trajectories end untrained, with the reason."""
        for member in members:
            self.record(member.dropped(reason, detail))

    def abort(self, trajectory: LiveTrajectory) -> None:
        """Queue an abort of a trajectory for the replica that runs it, if any, and free its place in the view."""
        if trajectory.runs_on is not None:
            self.views.returned(trajectory.runs_on, trajectory.id)
            self.aborts.setdefault(trajectory.runs_on, []).append(trajectory.id)

    def take_aborts(self) -> dict[int, list[str]]:
        """Return the queued aborts, ids of trajectories by replica, and empty the queue."""
        aborts, self.aborts = self.aborts, {}
        return aborts

    def sampling(self, trajectory: LiveTrajectory) -> SamplingParams:
        """Return the sampling params of a trajectory, with its own seed.

        A training trajectory has the run's params, and an evaluation the params of its set. An evaluation outside
        any set samples greedily.
        """
        sampling = self.settings.sampling
        if trajectory.kind is Kind.EVAL:
            greedy = msgspec.structs.replace(sampling, temperature=0.0)
            sampling = self.settings.sampling_by_set.get(set_of(trajectory.group_id), greedy)
        return msgspec.structs.replace(sampling, seed=trajectory_seed(self.settings.seed, trajectory.id))

    def finished_beside(self, trajectory_id: str) -> Sequence[int]:
        """Return response lengths of the finished members in a trajectory's group; none if it has no group."""
        trajectory = self.live.get(trajectory_id)
        group = None if trajectory is None else self.groups.get(trajectory.group_id)
        return () if group is None else group.finished_lengths

    def versions_alive(self) -> int:
        """Return the number of weight versions under which live training trajectories have run or run now."""
        versions, replicas = set[int](), set[int]()
        for trajectory in self.live.values():
            if trajectory.kind is Kind.TRAIN:
                versions.update(sampled_versions(trajectory.token_spans))
                if trajectory.runs_on is not None:
                    replicas.add(trajectory.runs_on)
        versions.update(self.views.by_index[replica].serving for replica in replicas)
        return len(versions - {-1})


def trajectory_seed(seed: int, trajectory_id: str) -> int:
    """Return a 63-bit sampling seed that depends on the run's seed and the trajectory's id alone."""
    digest = blake2b(f"{seed}/{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
