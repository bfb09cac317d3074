"""Environments that are told the turns of the model as they are sampled. Owned by `streams`.

Invariant: what is told is in the journal, so that a death of the replica changes nothing of it.
"""

import asyncio
from collections.abc import Callable

from laminar_py.records.protocols import Clock, EngineLostError, Environments
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
        lost: Callable[[EngineLostError], None],
    ) -> None:
        self._environments = environments
        self._store = store
        self._clock = clock
        self._lost = lost
        self._heard: dict[str, Running] = {}  # that have got more since they were told
        self._task: asyncio.Task[None] | None = None

    def heard(self, running: Running, tasks: asyncio.TaskGroup) -> None:
        """Tell the environment of a trajectory what has been sampled, together with others, in a task of those."""
        self._heard[running.assignment.trajectory_id] = running
        if self._environments is not None and (self._task is None or self._task.done()):
            self._task = tasks.create_task(self._tell(self._environments), name="listeners")

    async def _tell(self, environments: Environments) -> None:
        while self._heard:
            heard, self._heard = self._heard, {}
            inside = [running for running in heard.values() if running.state is StreamState.IN_ENGINE]
            pieces = [running.note(self._clock.now()) for running in inside]
            try:
                self._store.note([piece for piece in pieces if piece is not None])
            except EngineLostError as error:
                self._lost(error)
                return
            parts = [part for running in inside if (part := running.part()) is not None]
            if parts:
                await environments.hear(parts)
