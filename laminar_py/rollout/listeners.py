"""Streaming of sampled tokens to environments that listen to a turn. `rollout.streams` owns it.

Tokens are in the journal before an environment gets them, so a dead replica's successor cannot sample others in
their place (law 9).
"""

import asyncio
from collections.abc import Callable

from laminar_py.records.engine import EngineLostError
from laminar_py.records.environment import Environments
from laminar_py.records.host import Clock
from laminar_py.rollout.callbacks import Callbacks
from laminar_py.rollout.running import RunningTrajectory, StreamState
from laminar_py.rollout.storing import ResponseStore


class Listeners:
    """Streams turns to listening environments; calls `lost(error)` if tokens cannot be stored."""

    def __init__(
        self,
        environments: Environments | None,
        store: ResponseStore,
        clock: Clock,
        *,
        callbacks: Callbacks,
        lost: Callable[[EngineLostError], None],
    ) -> None:
        self._environments = environments
        self._store = store
        self._clock = clock
        self._callbacks = callbacks
        self._lost = lost
        self._heard: dict[str, RunningTrajectory] = {}  # with tokens not sent yet

    def sampled(self, running: RunningTrajectory) -> None:
        """Schedule the sending of a trajectory's new tokens, together with those of others."""
        if self._environments is None:
            return
        if not self._heard:
            asyncio.get_running_loop().call_soon(self._send, self._environments)
        self._heard[running.assignment.trajectory_id] = running

    def _send(self, environments: Environments) -> None:
        heard, self._heard = self._heard, {}
        if self._callbacks.ended:
            return
        inside = [running for running in heard.values() if running.state is StreamState.IN_ENGINE]
        with self._callbacks.guarded():
            pieces = [running.pop_unjournaled(self._clock.now()) for running in inside]
            try:
                self._store.journal([piece for piece in pieces if piece is not None])
            except EngineLostError as error:
                self._lost(error)
                return
            parts = [part for running in inside if (part := running.pop_part()) is not None]
            if parts:
                environments.hear(parts)
