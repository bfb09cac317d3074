"""Requests in the embedded engine, and which of them lends another the KV cache of their prompt.

Called by the scheduler. Invariant: a lender's cache begins with exactly the tokens that the other needs, all
computed by the present weights, or will when its prefill is done.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from laminar_py.engines.local.prefill import Prefill
from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest
from laminar_py.records.pieces import RoutedExperts


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A request in the engine, e.g. one that waits: `Job(ticket=7, request=request, response=prefix_ids)`."""

    ticket: int  # the stream that its deltas go to
    request: GenerateRequest
    response: IntArray  # [L] what it had when it last joined the waiting queue
    experts: RoutedExperts | None = None  # recorded before that, from `request.routed` on
    version: int = -1  # the oldest weights in its KV cache, once that is complete
    prefill: Prefill | None = None

    @property
    def cached_ids(self) -> IntArray:
        """Tokens that must be in the cache before it decodes: all but the last."""
        return np.concatenate([self.request.prompt_ids, self.response])[:-1]

    def begins_as(self, other: "Job", version: int) -> bool:
        """True where the cache has what `other`, without a response yet, needs of the weights of `version`."""
        if self.prefill is None:
            usable = self.version == version
        else:
            usable = self.prefill.made_by(version) and not len(self.response)
        return usable and np.array_equal(self.request.prompt_ids, other.request.prompt_ids)


class Siblings:
    """Jobs that have slots, by group."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, dict[int, Job]] = defaultdict(dict)

    def join(self, slot: int, job: Job) -> None:
        """Note that `job` is in `slot`."""
        self._groups[job.request.group_id][slot] = job

    def leave(self, slot: int, job: Job) -> None:
        """Note that `job` has left `slot`."""
        members = self._groups[job.request.group_id]
        del members[slot]
        if not members:
            del self._groups[job.request.group_id]

    def lender(self, job: Job, *, version: int) -> tuple[int, Job] | None:
        """Slot and job whose cache begins, or will, with what `job` needs under `version`."""
        if len(job.response):
            return None
        members = self._groups.get(job.request.group_id, {})
        return next(((slot, other) for slot, other in members.items() if other.begins_as(job, version)), None)
