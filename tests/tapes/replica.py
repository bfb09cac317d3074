"""Pretend replicas: what `rollout.replica` does, in ticks and without an engine.

DRAIN: open until its batch is full -> closed -> empty -> loads the newest weights. Else new weights come under
what runs, which is interrupted (resume) or not (in_place).
"""

from collections import deque
from dataclasses import dataclass, field

from tests.tapes.plain import Given, Look, Said, Told, luck
from tests.tapes.plans import Plan

TOKENS_PER_S = 22.0
PARTIAL_S = 0.8
EVALUATED = 9  # most tokens of an evaluation's answer


class Weights:
    """Weights that relays hold, and since when; a replica hears of each a little later."""

    def __init__(self, keep: int) -> None:
        self.forgotten: set[int] = set()
        self._keep = keep
        self._said: list[tuple[float, int]] = []

    @property
    def newest(self) -> int:
        """Newest version, -1 without any."""
        return self._said[-1][1] if self._said else -1

    def publish(self, version: int, now: float) -> None:
        """Hold a new one."""
        self._said.append((now, version))

    def start_over(self, newest: int) -> None:
        """Begin at 0, as an incarnation's clock does; what is not on record was lost with the last one."""
        self._said = [(0.0, version) for _, version in self._said if version <= newest]

    def heard(self, now: float, index: int) -> int:
        """Newest version that this replica has heard of."""
        return max((version for said, version in self._said if said + 0.13 * (index % 5) <= now), default=-1)

    def has(self, version: int) -> bool:
        """Say if it can be pulled."""
        versions = [said for _, said in self._said]
        return version in versions[-self._keep :] and version not in self.forgotten


@dataclass(slots=True)
class Work:
    """Trajectory on a replica."""

    given: Given
    length: int
    target: int
    reported: int
    routed: int
    began_s: float
    reported_s: float
    first_s: float | None = None
    kv_version: int | None = None
    spans: list[list] = field(default_factory=list)  # of the present stream: version, start, end, KV version
    refused: bool = False


class Replica:
    """Life of replica `index`."""

    def __init__(self, plan: Plan, index: int, *, life: int, weights: Weights, initial: list[Given]) -> None:
        self.index = index
        self.plan = plan
        self.life = life
        self.version = -1
        self.work: dict[str, Work] = {}
        self.expected: set[str] = set()
        self.stopping = False
        self._weights = weights
        self._pinned: list[Given] = []
        self._mail: deque[tuple[float, str, object]] = deque()
        self._newest = -1
        self._admitted = 0
        self._received = 0
        self._open = False
        self._loading: tuple[float, int, bool] | None = None  # until when, which version, for pinned ones
        self._said: list[Said] = []
        self._loads: list[tuple[int, float, str | None]] = []
        self._lost: list[str] = []
        self._urgent = False
        self._submit(initial, 0.0)

    # ---- in

    def send(self, due: float, verb: str, what: object) -> None:
        """Put the controller's word on its way; words arrive in order."""
        last = self._mail[-1][0] if self._mail else 0.0
        self._mail.append((max(due, last), verb, what))

    def expect(self, version: int, names: list[str]) -> bool:
        """Promise to keep the version until these have come, or not."""
        if version != self.version or not self._keeps_version:
            return False
        self.expected.update(names)
        return True

    def tick(self, now: float, elapsed: float) -> None:
        """Let time pass."""
        while self._mail and self._mail[0][0] <= now:
            _, verb, what = self._mail.popleft()
            getattr(self, f"_{verb}")(what, now)
        self._newest = max(self._newest, self._weights.heard(now, self.index))
        if self._loading is not None and self._loading[0] <= now:
            self._loaded(now)
        if self._loading is None:
            self._generate(now, elapsed)
            self._refresh(now)
        for work in self.work.values():
            if work.length > work.reported and now - work.reported_s >= PARTIAL_S:
                self._say(work, now)
                self._urgent = True

    # ---- out

    def survey(self) -> Look:
        """Survey of this moment."""
        training = [work for work in self.work.values() if work.given.trains]
        running = tuple(_held(work) for work in training if work.first_s is not None)
        waiting = tuple(_held(work) for work in training if work.first_s is None)
        used = sum(context for _, context, _ in running)
        settled = len(training) == len(self.work) and not self._pinned and self._keeps_version
        return Look(self.index, self.version, self.plan.slots, used, self.plan.kv, running, waiting, settled)

    @property
    def urgent(self) -> bool:
        """Say if something is to be told."""
        return self._urgent or bool(self._said or self._loads or self._lost)

    def report(self) -> Told:
        """Report all since the last one."""
        told = Told(
            self.index,
            self.version,
            self._admissible,
            self._received,
            tuple(self._said),
            tuple(self._loads),
            tuple(self._lost),
        )
        self._said, self._loads, self._lost, self._urgent = [], [], [], False
        return told

    def cut(self, now: float) -> Told:
        """Last report of one whose engine is gone."""
        for work in self.work.values():
            self._say(work, now, broken="engine_lost")
        return self.report()

    # ---- the controller's words

    def _submit(self, some: list[Given], now: float) -> None:
        self._received += sum(given.pin is None for given in some)
        self.expected.difference_update(given.id for given in some)
        for given in some:
            if self.stopping and given.trains:
                self._hand_back(given)
            elif given.pin is None or (given.pin == self.version and self._loading is None):
                self._start(given, now)
            else:
                self._pinned.append(given)
        self._pinned.sort(key=lambda given: given.pin or 0)

    def _abort(self, names: list[str], now: float) -> None:
        for given in [given for given in self._pinned if given.id in names]:
            self._pinned.remove(given)
            self._hand_back(given)
        for name in names:
            if name in self.work:
                self._end(self.work[name], now, "abort")

    def _call_off(self, names: list[str], now: float) -> None:
        self.expected.difference_update(names)

    def _stop(self, _: object, now: float) -> None:
        self.stopping, self._open = True, False
        self.expected.clear()
        names = [given.id for given in self._pinned if given.trains]
        self._abort(names + [work.given.id for work in self.work.values() if work.given.trains], now)

    def _again(self, _: object, now: float) -> None:
        """Go on after a stop."""
        self.stopping = False

    # ---- what it runs

    def _start(self, given: Given, now: float) -> None:
        self._admitted += given.trains and given.pin is None
        length, target = given.prefix, self._target(given)
        refused = given.trains and luck(self.plan.seed, given.id, "refused").random() < self.plan.p_refuse
        self.work[given.id] = Work(
            given, length, max(target, length + 1), length, given.routed, now, now, refused=refused
        )

    def _target(self, given: Given) -> int:
        """Tokens that it will have; the same wherever it runs."""
        drawn = luck(self.plan.seed, given.id, "length").lognormvariate(0.0, self.plan.sigma) * self.plan.median
        return max(1, min(int(drawn), given.cap if given.trains else EVALUATED))

    def _generate(self, now: float, elapsed: float) -> None:
        if self.version < 0:
            return
        room = self.plan.kv - sum(w.given.prompt + w.length for w in self.work.values() if w.first_s is not None)
        slots = self.plan.slots - sum(work.first_s is not None for work in self.work.values())
        for work in list(self.work.values()):
            if work.refused:
                self._say(work, now, refusal="too long")
                del self.work[work.given.id]
                continue
            if work.first_s is None:
                room -= work.given.prompt + work.length
                if slots <= 0 or room < 0:
                    continue
                slots -= 1
                work.first_s = now
            self._grow(work, now, max(1, int(elapsed * TOKENS_PER_S)))

    def _grow(self, work: Work, now: float, count: int) -> None:
        end = min(work.target, work.length + count)
        last = work.spans[-1] if work.spans else None
        if last is not None and last[0] == self.version and last[3] == work.kv_version:
            last[2] = end
        elif end > work.length:
            work.spans.append([self.version, work.length, end, work.kv_version])
        work.length = end
        limit = self.plan.max_seconds
        if work.length == work.target:
            capped = work.given.trains and work.length >= work.given.cap
            self._end(work, now, "length" if capped else "stop")
        elif limit is not None and work.given.trains and work.given.used_s + now - work.first_s > limit:
            self._end(work, now, "length", wall_cut=True)

    def _end(self, work: Work, now: float, reason: str, *, wall_cut: bool = False) -> None:
        self._say(work, now, end=reason, wall_cut=wall_cut)
        del self.work[work.given.id]
        self._urgent = True

    def _hand_back(self, given: Given) -> None:
        self._said.append(Said(given.id, given.epoch, given.prefix, 0, given.seed, (), "abort"))

    def _say(
        self,
        work: Work,
        now: float,
        *,
        end: str | None = None,
        wall_cut: bool = False,
        broken: str | None = None,
        refusal: str = "",
    ) -> None:
        given, start = work.given, work.reported
        over = end is not None or broken == "new_weights"
        spans = self._corrected(work) if over else _clipped(work.spans, start)
        experts = None
        positions = given.prompt + work.length - 1
        if self.plan.records and over and work.length > given.prefix and positions > work.routed:
            experts, work.routed = (work.routed, positions), positions
        first = now if work.first_s is None else work.first_s
        self._said.append(
            Said(
                given.id,
                given.epoch,
                start,
                work.length - start,
                given.seed,
                spans,
                end,
                wall_cut,
                round(first - work.began_s, 3),
                round(now - work.began_s, 3),
                broken,
                refusal,
                experts,
                self.plan.records,
            )
        )
        work.reported, work.reported_s = work.length, now

    def _corrected(self, work: Work) -> tuple:
        """Spans of the engine's last word, which may put a change of version where its stream did not have it."""
        spans, pick = work.spans, luck(self.plan.seed, work.given.id, work.length, "restamp").random()
        if len(spans) < 2 or pick > 0.6 or spans[-2][2] - spans[-2][1] < 2:
            return _clipped(spans, work.reported)
        spans[-2][2] -= 1
        spans[-1][1] -= 1
        return tuple(tuple(span) for span in spans)

    # ---- weights

    def _refresh(self, now: float) -> None:
        if not self.work and self.expected:
            return
        if self._pinned:
            if not self.work:
                self._load_pinned(now)
        elif not self.work:
            self._begin_round(now)
        elif self._newest > self.version and self._may_swap:
            self._swap(now)

    def _begin_round(self, now: float) -> None:
        if self._newest > self.version:
            self._load(self._newest, now, pinned=False)
            return
        if self.version < 0:
            return
        if not self._open and not self.stopping:
            self._admitted, self._open, self._urgent = 0, True, True
        elif self._admitted:
            self._admitted, self._urgent = 0, True

    def _load_pinned(self, now: float) -> None:
        version = self._pinned[0].pin
        if version <= self.version:
            self._take_pinned(now)
        elif self._weights.has(version):
            self._load(version, now, pinned=True)
        else:
            self._lost += [given.id for given in self._pinned if given.pin == version]
            self._pinned = [given for given in self._pinned if given.pin != version]

    def _load(self, version: int, now: float, *, pinned: bool) -> None:
        took = self.plan.load_s * (1 + self.index % 3 / 4)
        self._open = False
        self._loading = (now + took, version, pinned)

    def _loaded(self, now: float) -> None:
        _, version, pinned = self._loading
        self._loading, self.version = None, version
        checksum = f"sum{version}" if version % 2 else None
        self._loads.append((version, round(self.plan.load_s, 3), checksum))
        if pinned:
            self._take_pinned(now)
        elif not self.work:
            self._begin_round(now)
        else:  # what came while the weights were loaded begins under them
            self._admitted = sum(work.given.trains and work.given.pin is None for work in self.work.values())
            self._open = not self.stopping

    def _take_pinned(self, now: float) -> None:
        self._open = self.version >= self._newest and not self.stopping
        waiting, self._pinned = self._pinned, []
        for given in waiting:
            if given.pin == self.version:
                self._admitted += given.trains
                self._start(given, now)
            elif given.pin < self.version:
                self._hand_back(given)
            else:
                self._pinned.append(given)
        self._urgent = True

    def _swap(self, now: float) -> None:
        """Load new weights under what runs."""
        resumes = self.plan.on_new_weights == "resume"
        for work in self.work.values():
            if work.first_s is None:
                continue
            if resumes:
                self._say(work, now, broken="new_weights")
                work.spans = []
            elif work.kv_version is None:
                work.kv_version = self.version
        self.version = self._newest
        self._loads.append((self.version, round(self.plan.load_s, 3), None))

    # ---- what it admits

    @property
    def _drains(self) -> bool:
        return self.plan.on_new_weights == "drain"

    @property
    def _may_swap(self) -> bool:
        evaluating = any(not work.given.trains for work in self.work.values())
        return not self._drains and not self.stopping and not evaluating

    @property
    def _keeps_version(self) -> bool:
        return self._loading is None and self.version >= 0 and not self.stopping and bool(self.work)

    @property
    def _admissible(self) -> int:
        if not self._open or self.stopping or self._pinned:
            return 0
        return self.plan.takes - (self._admitted if self._drains else len(self.work))


def _held(work: Work) -> tuple[str, int, int]:
    return work.given.id, work.given.prompt + work.length, work.length


def _clipped(spans: list[list], start: int) -> tuple:
    """Clip spans to tokens from `start` on."""
    return tuple((v, max(first, start), end, kv) for v, first, end, kv in spans if end > start)
