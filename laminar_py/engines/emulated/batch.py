"""The running requests of an emulated engine, and the prefixes in its KV cache. Owned by `scheduler`.

The scheduler asks at every event, so no method walks over all requests.
"""

from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush

from laminar_py.engines.emulated.responses import PlannedResponse
from laminar_py.records.engine import GenerateRequest


@dataclass(slots=True, eq=False, kw_only=True)
class EmulatedJob:
    """A request in the engine; a new request has `length=0, sent=0`."""

    request: GenerateRequest
    response: PlannedResponse
    length: int  # response tokens at the last start of its wait or run
    sent: int  # response tokens sent in deltas
    since: int = 0  # engine steps before its admission
    stay: int = -1  # number of its admission, -1 while it waits
    is_young: bool = False  # True while its growth reserve counts
    version: int = -1  # weights that filled its cache

    @property
    def context(self) -> int:
        """Tokens that must be in the cache before the request runs."""
        return len(self.request.prompt_ids) + self.length

    @property
    def last_step(self) -> int:
        """Engine steps at its end, if nothing interrupts the request."""
        return self.since + self.response.num_tokens - self.length


class Batch:
    """The running requests, e.g. `Batch(reserve=600)`, which reserves 600 tokens for the growth of a new request.

    Heap and queue remove an ended request only when its entry reaches the front. The admission number of the entry
    then differs from the job's, which shows that the entry is old.
    """

    def __init__(self, *, reserve: int) -> None:
        self._steps = reserve
        self.jobs: dict[str, EmulatedJob] = {}  # by id, the oldest admission first; changed here alone
        self._ends: list[tuple[int, int, EmulatedJob]] = []  # heap: last step, number of the admission
        self._young: deque[tuple[int, EmulatedJob]] = deque()  # admitted within `reserve` steps, oldest first
        self._young_since = self._num_young = 0  # of running young requests: sum of `since`, and count
        self._prompts: Counter[tuple[str, int]] = Counter()  # requests by group and version
        self._num_admitted = 0

    @property
    def youngest(self) -> EmulatedJob:
        """The last admitted request."""
        return next(reversed(self.jobs.values()))

    def add(self, job: EmulatedJob, *, step: int, version: int) -> None:
        """Add a request, admitted after `step` engine steps under the weights of `version`."""
        self._num_admitted += 1
        job.since, job.version, job.stay, job.is_young = step, version, self._num_admitted, True
        self.jobs[job.request.rid] = job
        heappush(self._ends, (job.last_step, job.stay, job))
        self._young.append((job.stay, job))
        self._young_since, self._num_young = self._young_since + step, self._num_young + 1
        self._prompts[job.request.group_id, version] += 1

    def remove(self, job: EmulatedJob) -> None:
        """Remove a request that ended or was retracted."""
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
        """Last step of the request that ends first. The batch must not be empty."""
        ends = self._ends
        while ends[0][1] != ends[0][2].stay:
            heappop(ends)
        return ends[0][0]

    def ends_at(self, step: int) -> EmulatedJob | None:
        """A request that ends with `step`, the oldest admission of several; None if no request ends."""
        return self._ends[0][2] if self.jobs and self.next_end == step else None

    def reserved(self, step: int) -> int:
        """Tokens of the growth reserve that young requests have not used after `step` engine steps."""
        begun = step - self._steps
        while self._young and (self._young[0][0] != self._young[0][1].stay or self._young[0][1].since <= begun):
            stay, job = self._young.popleft()
            if job.stay == stay:
                self._release(job)
        return self._young_since - self._num_young * begun

    def has_prompt(self, group_id: str, version: int) -> bool:
        """True if a running member of the group has its prompt in the cache by the weights of `version`."""
        return (group_id, version) in self._prompts

    def _release(self, job: EmulatedJob) -> None:
        if job.is_young:
            job.is_young = False
            self._young_since, self._num_young = self._young_since - job.since, self._num_young - 1


class PrefixCache:
    """Cached tokens of finished requests by id, until the room is needed.

    Like a radix cache, it uses the room that running requests leave, and evicts the least recently used prefix.
    The scheduler clears it on new weights.
    """

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}  # by id, the least recently used first; each counts its whole prompt
        self._num_tokens = 0

    def keep(self, rid: str, num_tokens: int) -> None:
        """Keep the cache of a request that ended with `num_tokens` tokens."""
        self.remove(rid)
        self._kept[rid] = num_tokens
        self._num_tokens += num_tokens

    def remove(self, rid: str) -> int:
        """Remove the cache of a request and return its tokens; 0 if there is none."""
        num_tokens = self._kept.pop(rid, 0)
        self._num_tokens -= num_tokens
        return num_tokens

    def shrink(self, room: int) -> None:
        """Evict until at most `room` tokens are left."""
        while self._num_tokens > room:
            self.remove(next(iter(self._kept)))

    def clear(self) -> None:
        """Drop all caches, since new weights are loaded."""
        self._kept.clear()
        self._num_tokens = 0
