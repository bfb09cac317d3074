"""A run as its controller records it, without the run: for measuring the ledger and its readers.

Groups of 8 of about 100 response tokens each, every trajectory interrupted once and moved, so that it has 8 events
and two pieces; 256 of them a step, three steps' worth live, a version a step. Driven by `measure`; seeded.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from laminar_py.ledger.database import SCHEMA_VERSION
from laminar_py.ledger.ledger import Ledger
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.digests import response_digest
from laminar_py.records.events import (
    Assigned,
    Checkpointed,
    Consumed,
    Dropped,
    Finished,
    Interrupted,
    Issued,
    Ready,
    RunStarted,
    Scored,
    Stepped,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Prompt, Span

GROUP = 8
STEP = 32  # groups
LIVE = 96  # groups
REPLICAS = 16
MEAN_TOKENS = 100
CHECKPOINT_EVERY = 10  # steps
HOST = "host-1"
_DROPPED_EVERY = 41  # groups


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group in flight: its number, its version and the responses of its members."""

    number: int
    version: int
    responses: list[tuple[IntArray, FloatArray]]


class SyntheticRun:
    """Appends to `ledger` what a run would; each call of `advance` is a learner step."""

    def __init__(self, ledger: Ledger, *, seed: int = 0) -> None:
        self._ledger = ledger
        self._rng = np.random.default_rng(seed)
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
        """Make a learner step, and issue the groups that come in its place."""
        while len(self._live) < LIVE:
            self._issue()
        used = [self._finish(self._live.popleft()) for _ in range(STEP)]
        self.step += 1
        consumed = [
            Consumed(
                trajectory_id=id,
                step=self.step,
                version=self.step - 1,
                staleness=self.step - 1 - version,
                weight=1.0,
            )
            for version, ids in used
            for id in ids
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
        """Make everything consumed so far final."""
        path = f"checkpoints/step-{self.step}-1.0"
        self._ledger.append(
            Checkpointed(step=self.step, version=self.step, path=path, stall_s=0.01, elapsed_s=0.5)
        )

    def _publish(self) -> None:
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
        number = self._issued
        self._issued += 1
        prompt_ids = self._ids[number % 4096 :][:64]
        text = f"What is {number} times {number + 7}? Think step by step and box the answer."
        self._ledger.store_prompt(
            Prompt(
                id=f"p{number}",
                index=number,
                text=text,
                ids=prompt_ids,
                answer=str(number * (number + 7)),
                task="times",
            )
        )
        responses = []
        lengths = np.clip(self._rng.lognormal(np.log(MEAN_TOKENS) - 0.18, 0.6, GROUP), 1, 4000).astype(int)
        for member, length in enumerate(lengths.tolist()):
            start = int(self._rng.integers(0, len(self._ids) - length))
            responses.append((self._ids[start : start + length], self._logprobs[start : start + length]))
            id = f"g{number}.{member}"
            self._ledger.append(
                Issued(
                    trajectory_id=id,
                    group_id=f"g{number}",
                    prompt_id=f"p{number}",
                    prompt_index=number,
                    sample_index=member,
                    kind=Kind.TRAIN,
                )
            )
            self._ledger.append(Assigned(id, number % REPLICAS, 1, 0))
        self._live.append(LiveGroup(number, self.step, responses))

    def _finish(self, group: LiveGroup) -> tuple[int, list[str]]:
        """Finish a group; returns its version, and the ids of what is ready to be trained on."""
        ids = []
        for member, (tokens, logprobs) in enumerate(group.responses):
            id = f"g{group.number}.{member}"
            epoch = self._generate(group, id, tokens, logprobs)
            spans = (Span(group.version, 0, len(tokens)),)
            digest = response_digest(tokens, logprobs)
            finished = Finished(
                trajectory_id=id,
                epoch=epoch,
                finish_reason=FinishReason.STOP,
                spans=spans,
                length=len(tokens),
                digest=digest,
                queue_s=0.5,
                generate_s=2.5,
            )
            self._ledger.append(finished)
            self._ledger.append(Scored(id, float(member % 2), 0.002))
            ids.append(id)
        if group.number % _DROPPED_EVERY == 0:
            for id in ids:
                self._ledger.append(Dropped(id, DropReason.NO_SIGNAL))
            return group.version, []
        for member, id in enumerate(ids):
            self._ledger.append(Ready(id, 1.0 if member % 2 else -1.0))
        return group.version, ids

    def _generate(self, group: LiveGroup, id: str, tokens: IntArray, logprobs: FloatArray) -> int:
        """Store a response in two pieces, and its interruption between them; returns its last epoch."""
        half = len(tokens) // 2
        for start, end in ((0, half), (half, len(tokens))):
            if start < end:
                spans = (Span(group.version, start, end),)
                self._ledger.store_segment(id, start, spans, tokens[start:end], logprobs[start:end])
            if end == half and half:
                self._ledger.append(Interrupted(id, 1, half, "repacked"))
                self._ledger.append(Assigned(id, (group.number + 1) % REPLICAS, 2, half))
        return 2 if half else 1
