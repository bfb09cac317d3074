"""Dropped trajectories that go on all the same, so that reports can say what dropping costs.

Owned by `control.flow`. A trajectory that a deadline drops is DROPPED for good: no group, no learner and no
accounting knows it any more. A share of those, chosen by a hash of their ids, is not aborted: RUNNING on its
replica -> FINISHED, waits for its score -> on record as `Probed`. Whatever breaks it off ends it without a word.
Invariant: at most `most` go on at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

from laminar_py.control.book import Recorder
from laminar_py.control.lifecycle import Lifecycle
from laminar_py.records.events import Probed
from laminar_py.records.replica import Progress
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import FinishReason, Prompt, Status, Trajectory

_UNIT = 2.0**64


class Probes:
    """Those under way."""

    def __init__(
        self,
        *,
        share: float,
        most: int,
        recorder: Recorder,
        submit_score: Callable[[Trajectory, Prompt], None],
    ) -> None:
        self._share = share
        self._most = most
        self._recorder = recorder
        self._submit_score = submit_score
        self._open: dict[str, Lifecycle] = {}  # copies: the flow's own are dropped

    def __contains__(self, trajectory_id: str) -> bool:
        """Whether it goes on."""
        return trajectory_id in self._open

    def take(self, lifecycle: Lifecycle) -> bool:
        """Whether one that is about to be dropped goes on; then its replica is told nothing."""
        goes_on = lifecycle.status is Status.RUNNING or lifecycle.finish_reason is not None
        if not goes_on or len(self._open) >= self._most or not is_chosen(lifecycle.id, self._share):
            return False
        self._open[lifecycle.id] = replace(lifecycle, ids=list(lifecycle.ids), logprobs=list(lifecycle.logprobs))
        return True

    def on_progress(self, progress: Progress) -> bool:
        """Take in what is reported of a probe; whether its replica is done with it."""
        probe = self._open.get(progress.trajectory_id)
        if probe is None or not probe.accepts(progress):
            return False
        probe.grow(progress)
        if progress.refusal or progress.finish_reason is FinishReason.ABORT:
            return self.end(probe.id)
        if progress.finish_reason is None:
            return False
        probe.finish(progress)
        self._submit_score(probe.trajectory(), probe.prompt)
        return True

    def on_score(self, score: Score) -> None:
        """Put on record what became of a probe."""
        probe = self._open.pop(score.trajectory_id, None)
        if probe is None or probe.finish_reason is None:
            return
        self._recorder.append(
            Probed(
                trajectory_id=probe.id,
                length=probe.length,
                finish_reason=probe.finish_reason,
                reward=score.value,
                generate_s=probe.used_s + probe.here_s,
            )
        )

    def end(self, trajectory_id: str) -> bool:
        """It goes on no more; whether it did."""
        return self._open.pop(trajectory_id, None) is not None


def is_chosen(trajectory_id: str, share: float) -> bool:
    """The same answer for the same trajectory, whenever it is asked."""
    digest = blake2b(f"probe/{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / _UNIT < share
