"""The requests that an emulated engine runs. Owned by `scheduler`, which asks at every event, so that nothing here
looks at all of them.

As in a radix cache they have the room that running requests leave, and those that were used longest ago make room.
Invariant: what is kept was computed by the weights in use.
"""

from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush

from laminar_py.engines.emulated.responses import PlannedResponse
from laminar_py.records.engine import GenerateRequest


class PrefixCache:
    """Tokens of requests that have left, each by its id, until another takes their place."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}  # by id, the longest unused first; each counts its prompt in full
        self._num_tokens = 0

    def keep(self, rid: str, num_tokens: int) -> None:
        """Keep what a request has left."""
        self.remove(rid)
        self._kept[rid] = num_tokens
        self._num_tokens += num_tokens

    def remove(self, rid: str) -> int:
        """Tokens that are there of a request which runs again, and holds them itself from here on."""
        num_tokens = self._kept.pop(rid, 0)
        self._num_tokens -= num_tokens
        return num_tokens

    def shrink(self, room: int) -> None:
        """Have at most so many tokens stay."""
        while self._num_tokens > room:
            self.remove(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget all, since the weights are others now."""
        self._kept.clear()
        self._num_tokens = 0


@dataclass(slots=True, eq=False, kw_only=True)
class EmulatedJob:
    """A request in the engine; a new one has `length=0, sent=0`."""

    request: GenerateRequest
    response: PlannedResponse
    length: int  # response tokens when it last began to wait or to run
    sent: int  # response tokens that left in deltas
    since: int = 0  # steps that the engine had made when it began to run
    stay: int = -1  # number of its admission, -1 while it does not run
    is_young: bool = False  # True while what is reserved for its growth counts
    version: int = -1  # of the weights that filled its cache

    @property
    def context(self) -> int:
        """Tokens that must be in the cache before it runs."""
        return len(self.request.prompt_ids) + self.length

    @property
    def last_step(self) -> int:
        """Steps that the engine will have made when it ends, if it runs on."""
        return self.since + self.response.num_tokens - self.length


class Batch:
    """Requests that run, e.g. `Batch(reserve=600)`: that many tokens are kept free for the growth of each new one.

    Entries of requests that have left stay in heap and queue until they come to the front, where the number of
    their admission tells them.
    """

    def __init__(self, *, reserve: int) -> None:
        self._steps = reserve
        self.jobs: dict[str, EmulatedJob] = {}  # by id, the oldest admission first; changed here alone
        self._ends: list[tuple[int, int, EmulatedJob]] = []  # heap: last step, number of the admission
        self._young: deque[tuple[int, EmulatedJob]] = deque()  # admitted within `reserve` steps, oldest first
        self._young_since = self._num_young = 0  # sum of their first steps, and number, of those that run
        self._prompts: Counter[tuple[str, int]] = Counter()  # requests by group and version
        self._num_admitted = 0

    @property
    def youngest(self) -> EmulatedJob:
        """The request that was admitted last."""
        return next(reversed(self.jobs.values()))

    def add(self, job: EmulatedJob, *, step: int, version: int) -> None:
        """Admit a request after so many steps of the engine, under its present weights."""
        self._num_admitted += 1
        job.since, job.version, job.stay, job.is_young = step, version, self._num_admitted, True
        self.jobs[job.request.rid] = job
        heappush(self._ends, (job.last_step, job.stay, job))
        self._young.append((job.stay, job))
        self._young_since, self._num_young = self._young_since + step, self._num_young + 1
        self._prompts[job.request.group_id, version] += 1

    def remove(self, job: EmulatedJob) -> None:
        """Take out a request."""
        del self.jobs[job.request.rid]
        self._release(job)
        job.stay, prompt = -1, (job.request.group_id, job.version)
        self._prompts[prompt] -= 1
        if not self._prompts[prompt]:
            del self._prompts[prompt]
        if not self.jobs:
            self._ends.clear()
            self._young.clear()

    @property
    def next_end(self) -> int:
        """Last step of the request that ends first; there is one."""
        ends = self._ends
        while ends[0][1] != ends[0][2].stay:
            heappop(ends)
        return ends[0][0]

    def ends_at(self, step: int) -> EmulatedJob | None:
        """A request that ends with that step, of several the oldest admission; None if all go on."""
        return self._ends[0][2] if self.jobs and self.next_end == step else None

    def reserved(self, step: int) -> int:
        """Tokens that are kept free for growth after so many steps of the engine, as far as they are not used."""
        begun = step - self._steps
        while self._young and (self._young[0][0] != self._young[0][1].stay or self._young[0][1].since <= begun):
            stay, job = self._young.popleft()
            if job.stay == stay:
                self._release(job)
        return self._young_since - self._num_young * begun

    def has_prompt(self, group_id: str, version: int) -> bool:
        """True where a member of the group has its prompt in the cache by those weights."""
        return (group_id, version) in self._prompts

    def _release(self, job: EmulatedJob) -> None:
        if job.is_young:
            job.is_young = False
            self._young_since, self._num_young = self._young_since - job.since, self._num_young - 1
