"""All live trajectories and groups of a run. Shared by the parts of `control`; changes nothing on its own.

Invariant: a trajectory is in `live` from its issue until it is consumed or dropped, and each of these is recorded
in the same call; a group is in `groups` until its step is committed or nothing of it is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import msgspec

from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.groups import Group
from laminar_py.control.lifecycle import Lifecycle
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.engine import SamplingParams
from laminar_py.records.events import AnyEvent
from laminar_py.records.recordings import RoutedExperts, SamplingMask
from laminar_py.records.trajectory import DropReason, Kind, Prompt, Span


class Recorder(Protocol):
    """Where events and response pieces go: the ledger."""

    def append(self, event: AnyEvent) -> None:
        """Record what happened."""
        ...

    def store_prompt(self, prompt: Prompt) -> None:
        """Keep a prompt's text and ids, once."""
        ...

    def store_segment(
        self,
        trajectory_id: str,
        start: int,
        spans: tuple[Span, ...],
        ids: IntArray,
        logprobs: FloatArray,
        *,
        sampling_mask: SamplingMask | None = None,
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        """Keep response tokens [start, start + n), which `spans` cover, and what was recorded with them."""
        ...

    def store_token_rewards(self, trajectory_id: str, rewards: FloatArray) -> None:
        """Keep the scores of a finished response's tokens, [L]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """The settings that a trajectory's way depends on; meanings as in `config.RolloutConfig`."""

    seed: int
    group_size: int
    sampling: SamplingParams
    without_signal: WithoutSignal
    one_version: bool  # drain: a trajectory continues only under its own version
    teaches: bool = False  # scores are a teacher's log-probabilities, one for each token
    group_deadline_s: float | None = None
    probe_share: float = 0.0
    max_probes: int = 0  # at a time
    min_group_survivors: int = 2
    max_seconds: float | None = None


class Book:
    """What is live, and the recorder of its changes."""

    def __init__(self, settings: FlowSettings, recorder: Recorder) -> None:
        self.settings = settings
        self.recorder = recorder
        self.live: dict[str, Lifecycle] = {}
        self.groups: dict[str, Group] = {}  # of training

    def record(self, event: AnyEvent) -> None:
        """Append an event."""
        self.recorder.append(event)

    def issue(self, id: str, group_id: str, sample_index: int, prompt: Prompt, kind: Kind) -> Lifecycle:
        """A new trajectory, QUEUED."""
        lifecycle = Lifecycle(
            id=id,
            group_id=group_id,
            sample_index=sample_index,
            prompt=prompt,
            kind=kind,
            sampling=self.sampling(id, kind),
        )
        self.live[id] = lifecycle
        self.record(lifecycle.issued())
        return lifecycle

    def issue_member(self, group: Group) -> Lifecycle:
        """The next sample of a group, e.g. "g3.8" in place of a lost one of 8."""
        index = group.next_sample
        group.next_sample += 1
        lifecycle = self.issue(f"{group.id}.{index}", group.id, index, group.prompt, Kind.TRAIN)
        group.members[lifecycle.id] = lifecycle
        return lifecycle

    def drop(self, members: Sequence[Lifecycle], reason: DropReason, detail: str = "") -> None:
        """They will never be trained on."""
        for member in members:
            self.record(member.drop(reason, detail))
            del self.live[member.id]

    def sampling(self, id: str, kind: Kind) -> SamplingParams:
        """The run's, with a seed of its own; an evaluation is greedy."""
        sampling = msgspec.structs.replace(self.settings.sampling, seed=trajectory_seed(self.settings.seed, id))
        return msgspec.structs.replace(sampling, temperature=0.0) if kind is Kind.EVAL else sampling

    def finished_by_group(self) -> dict[str, list[int]]:
        """Response lengths of finished samples, for each sample that goes on beside some."""
        out: dict[str, list[int]] = {}
        for group in self.groups.values():
            finished = [member.length for member in group.members.values() if member.finish_reason is not None]
            if 0 < len(finished) < len(group.members):
                out |= dict.fromkeys(group.members, finished)
        return out

    def versions_alive(self) -> int:
        """Distinct weight versions among live training trajectories."""
        training = (lifecycle for lifecycle in self.live.values() if lifecycle.kind is Kind.TRAIN)
        return len({span.version for lifecycle in training for span in lifecycle.spans})


def trajectory_seed(seed: int, trajectory_id: str) -> int:
    """A 63-bit sampling seed that depends on the run's seed and the trajectory alone."""
    digest = blake2b(f"{seed}/{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
