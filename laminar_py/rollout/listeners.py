"""Environments that are told the turns of the model as they are sampled. Owned by `streams`.

Invariant: what is told is in the journal, so that a death of the replica changes nothing of it.
"""

import asyncio
from collections.abc import Callable

from laminar_py.records.protocols import Clock, EngineLostError, Environments
from laminar_py.rollout.callbacks import Callbacks
from laminar_py.rollout.running import Running, StreamState
from laminar_py.rollout.storing import ResponseStore


class Listeners:
    """Turns to which environments listen; `lost()` if what is sampled cannot be stored."""

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
        self._heard: dict[str, Running] = {}  # that have got more since they were told

    def heard(self, running: Running) -> None:
        """Tell the environment of a trajectory what has been sampled, together with others, in a moment."""
        if self._environments is None:
            return
        if not self._heard:
            asyncio.get_running_loop().call_soon(self._tell, self._environments)
        self._heard[running.assignment.trajectory_id] = running

    def _tell(self, environments: Environments) -> None:
        heard, self._heard = self._heard, {}
        if self._callbacks.ended:
            return
        inside = [running for running in heard.values() if running.state is StreamState.IN_ENGINE]
        with self._callbacks.guarded():
            pieces = [running.note(self._clock.now()) for running in inside]
            try:
                self._store.note([piece for piece in pieces if piece is not None])
            except EngineLostError as error:
                self._lost(error)
                return
            parts = [part for running in inside if (part := running.part()) is not None]
            if parts:
                environments.hear(parts)
