"""A synthetic run that appends to a ledger as a controller does, to measure the ledger and its readers.

Groups have 8 trajectories of about 100 response tokens each. Each trajectory is interrupted once and moved, so
that it has 8 events and two pieces. A step has 256 trajectories and a version; three steps' worth are live.
Seeded.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar_py.ledger import SCHEMA_VERSION, Ledger, LiveTrajectory, issued
from laminar_py.ledger.segments import SegmentWriter, tokens_ref
from laminar_py.records import DropReason, FinishReason, Prompt
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.events import Checkpointed, Ready, RunStarted, Stepped, VersionLoaded, VersionPublished
from laminar_py.records.pieces import Piece
from laminar_py.records.replica import Progress
from laminar_py.records.scoring import Score
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Kind

GROUP = 8
STEP = 32  # groups
LIVE = 96  # groups
REPLICAS = 16
MEAN_TOKENS = 100
HOST = "host-1"
_DROPPED_EVERY = 41  # groups


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group in flight: number, version, and members, each with the response that it will have."""

    number: int
    version: int
    members: list[tuple[LiveTrajectory, IntArray, FloatArray]]


class SyntheticRun:
    """Appends the events of a run to `ledger`; each call of `advance` is a learner step."""

    def __init__(self, ledger: Ledger, segments: Path) -> None:
        self._ledger = ledger
        self._segment = SegmentWriter(segments, "replica-0-1-0")
        self._rng = np.random.default_rng(0)
        self._live: deque[LiveGroup] = deque()
        self._issued = 0
        self.step = 0
        self._ids = self._rng.integers(0, 150_000, 1 << 20).astype(np.int32)
        self._logprobs = -self._rng.exponential(0.5, 1 << 20).astype(np.float32)

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories issued so far."""
        return self._issued * GROUP

    def begin(self) -> None:
        """Start the run, with version 0."""
        self._ledger.append(
            RunStarted(
                incarnation=1,
                host=HOST,
                pid=1,
                schema=SCHEMA_VERSION,
                config_digest="c0",
                drain=True,
                max_staleness=None,
            )
        )
        self._publish()

    def advance(self) -> None:
        """Make a learner step, and issue new groups for the consumed ones."""
        while len(self._live) < LIVE:
            self._issue()
        ready = [member for _ in range(STEP) for member in self._finish(self._live.popleft())]
        version, self.step = self.step, self.step + 1
        consumed = [
            member.consumed(step=self.step, version=version, staleness=version - member.oldest_for_age, weight=1.0)
            for member in ready
        ]
        stepped = Stepped(
            step=self.step,
            incarnation=1,
            num_trajectories=len(consumed),
            num_tokens=MEAN_TOKENS * len(consumed),
            loss=0.1,
            grad_norm=0.2,
            reward=0.5,
            elapsed_s=0.3,
        )
        self._ledger.append_all([stepped, *consumed])
        self._publish()

    def checkpoint(self) -> None:
        """Record a checkpoint, which makes all consumed trajectories final."""
        path = f"checkpoints/step-{self.step}-1.0"
        self._ledger.append(
            Checkpointed(step=self.step, version=self.step, path=path, stall_s=0.01, elapsed_s=0.5)
        )

    def _publish(self) -> None:
        """Append the publication of the present step's weights, and the load by every replica."""
        version, digest = self.step, f"{self.step:032x}"
        self._ledger.append(
            VersionPublished(
                version=version,
                step=self.step,
                incarnation=1,
                parent=version - 1 or None,
                digest=digest,
                num_bytes=10**6,
                stall_s=0.005,
            )
        )
        for replica in range(REPLICAS):
            self._ledger.append(VersionLoaded(replica=replica, version=version, digest=digest, elapsed_s=0.05))

    def _issue(self) -> None:
        """Issue a group of one prompt, draw its responses, and assign every member to a replica."""
        number = self._issued
        self._issued += 1
        prompt = Prompt(
            id=f"p{number}",
            index=number,
            text=f"What is {number} times {number + 7}? Think step by step and box the answer.",
            ids=self._ids[number % 4096 :][:64],
            answer=str(number * (number + 7)),
            task="times",
        )
        self._ledger.store_prompt(prompt)
        members = []
        lengths = np.clip(self._rng.lognormal(np.log(MEAN_TOKENS) - 0.18, 0.6, GROUP), 1, 4000).astype(int)
        for index, length in enumerate(lengths.tolist()):
            start = int(self._rng.integers(0, len(self._ids) - length))
            id = f"g{number}.{index}"
            self._ledger.append(issued(prompt, id=id, group_id=f"g{number}", sample_index=index, kind=Kind.TRAIN))
            member = self._ledger.machine.live[id]
            self._ledger.append(member.assigned(number % REPLICAS))
            members.append((member, self._ids[start : start + length], self._logprobs[start : start + length]))
        self._live.append(LiveGroup(number, self.step, members))

    def _finish(self, group: LiveGroup) -> list[LiveTrajectory]:
        """Finish a group; return the members that are ready for training."""
        members = [member for member, _, _ in group.members]
        for member, ids, logprobs in group.members:
            half = len(ids) // 2
            if half:
                self._generate(member, group.version, ids[:half], logprobs[:half])
                self._ledger.append(member.interrupted("repacked"))
                self._ledger.append(member.assigned((group.number + 1) % REPLICAS))
            last = self._generate(member, group.version, ids[half:], logprobs[half:])
            self._ledger.append(member.finished(last))
            value = float(member.sample_index % 2)
            self._ledger.append(member.scored(Score(trajectory_id=member.id, value=value, elapsed_s=0.002)))
        if group.number % _DROPPED_EVERY == 0:
            for member in members:
                self._ledger.append(member.dropped(DropReason.NO_SIGNAL))
            return []
        for member in members:
            self._ledger.append(Ready(member.id, 1.0 if member.sample_index % 2 else -1.0))
        return members

    def _generate(self, member: LiveTrajectory, version: int, ids: IntArray, logprobs: FloatArray) -> Progress:
        """Store a piece of a response; return its progress as of the last piece."""
        start, spans = member.length, (Span(version, member.length, member.length + len(ids)),)
        piece = Piece(
            trajectory_id=member.id,
            epoch=member.epoch,
            start=start,
            spans=spans,
            ids=ids.tobytes(),
            logprobs=logprobs.tobytes(),
        )
        tokens = tokens_ref(piece, self._segment.write(piece))
        self._ledger.store_tokens(member.id, tokens, spans)
        return Progress(
            trajectory_id=member.id,
            epoch=member.epoch,
            start=start,
            tokens=tokens,
            spans=spans,
            finish_reason=FinishReason.STOP,
            queue_s=0.5,
            generate_s=2.5,
        )
