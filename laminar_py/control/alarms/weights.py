"""Alarms on weights: published versions, the tensors of engines, and their probabilities. Pure."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from laminar_py.records.events import RolledBack, Stepped, VersionLoaded, VersionPublished
from laminar_py.records.proofs import POWERS, Alarm, NextToken, ProbeAnswer

Odds: TypeAlias = npt.NDArray[np.float64]  # [len(WRONG)] in logs

RESTART = "restart the engine's server, or set rollout.engine otherwise, and --resume"


class WeightsCheck:
    """Compares digests of published versions with the hashes of the tensors that engines then serve."""

    def __init__(self) -> None:
        self._published: VersionPublished | None = None
        self._learned: set[int] = set()  # steps with gradients since the step of the last version
        self._loaded: dict[int, VersionLoaded] = {}  # replica -> last load with a hash

    def stepped(self, event: Stepped, row: None) -> Iterable[Alarm]:
        """Take a step of the learner."""
        if event.grad_norm:
            self._learned.add(event.step)
        return ()

    def rolled_back(self, event: RolledBack, row: None) -> Iterable[Alarm]:
        """Forget the steps that a rollback undid."""
        self._learned = {step for step in self._learned if step <= event.step}
        return ()

    def published(self, event: VersionPublished, row: None) -> Iterator[Alarm]:
        """Take a version."""
        before, self._published = self._published, event
        learned = sum(step <= event.step for step in self._learned)
        self._learned = {step for step in self._learned if step > event.step}
        if before is not None and before.step < event.step and before.digest == event.digest and learned:
            yield Alarm(
                "weights",
                "learner",
                f"version {event.version} has the bytes of version {before.version}, after {learned} steps"
                " with gradients: the updates are lost, or smaller than the published type can hold; raise"
                " learner.lr",
            )

    def loaded(self, event: VersionLoaded, row: None) -> Iterator[Alarm]:
        """Take a load of an engine."""
        if event.checksum is not None:
            earlier, self._loaded[event.replica] = self._loaded.get(event.replica), event
            yield from _compare(event, earlier)


def _compare(load: VersionLoaded, before: VersionLoaded | None) -> Iterator[Alarm]:
    """Compare a load with an earlier load of the same replica."""
    part = f"replica-{load.replica}"
    if load.stale:
        more = f" and {len(load.stale) - 1} more" if len(load.stale) > 1 else ""
        yield Alarm(
            "weights", part, f"version {load.version} did not reach {load.stale[0]}{more} of its engine; {RESTART}"
        )
    if before is None:
        return
    same_bytes, same_tensors = load.digest == before.digest, load.checksum == before.checksum
    if same_tensors and not same_bytes:
        yield Alarm(
            "weights",
            part,
            f"loaded version {load.version}, and its engine still has the tensors of version {before.version};"
            f" {RESTART}",
        )


# ---- probes

ODDS = 1e8  # at which a test decides: in a sound run it errs after a hundred million answers or more
KEPT = 64  # versions whose distributions are kept
FOLLOWED = 0.5  # share of the learner's movement that an engine must show
SIGMAS = 6.0
GAPS = 16  # answers over which differences are averaged
OLDER = 4.0  # times nearer to the version before: the engine has that version
FAR = 1.0  # movement of the learner in nats, beside which the rounding of weights is small


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest difference of log-probabilities between engine and learner, in nats."""

    single: float  # of one answer
    mean: float  # over `GAPS` answers
    rounding: float  # below which a mean difference says nothing
    movement: float  # of the learner, below which an engine need not be seen to follow
    several: int  # answers with a `single` difference among the last `GAPS` that are too many


EXACT = Tolerance(single=0.02, mean=0.01, rounding=1e-5, movement=1e-4, several=1)  # engine and learner in fp32
ROUNDED = Tolerance(single=0.75, mean=0.2, rounding=2e-3, movement=0.1, several=3)  # either in bf16


@dataclass(slots=True)
class _Movement:
    """Sums by which an engine's movement since the first version is compared with the learner's."""

    xx: float = 0.0  # squares of the learner's movement
    xy: float = 0.0  # products with the engine's
    yy: float = 0.0
    count: int = 0

    def add(self, learner: float, engine: float) -> None:
        self.xx += learner * learner
        self.xy += learner * engine
        self.yy += engine * engine
        self.count += 1

    def lags(self, least: float) -> bool:
        """Whether the learner moved by `least` nats or more (root of the mean square), and the engine surely
        follows less than half of it."""
        if self.count < 16 or self.xx < least * least * self.count:
            return False
        slope = self.xy / self.xx
        noise = math.sqrt(max(self.yy - slope * self.xy, 0.0) / self.count / self.xx)
        return slope < FOLLOWED and 1.0 - slope > SIGMAS * noise


TEMPERATURES = tuple(f"temperature {1 / power:g} times the run's" for power in POWERS)
NUCLEI = (0.5, 0.8, 0.9, 0.95)
COUNTS = (1, 5, 20, 50)
WRONG = (*TEMPERATURES, *(f"top_p={share:g}" for share in NUCLEI), *(f"top_k={count}" for count in COUNTS))
_HEDGE = 0.01  # share of a bet that stays with the right distribution, so that no token ends it
_STAYS, _HEDGED = math.log1p(-_HEDGE), math.log(_HEDGE)
EXPONENTS = np.array(POWERS) - 1.0
LEAST_MASS = 1e-4  # of tokens that are not known; rounding hides less


class ProbeDistribution:
    """The learner's distribution after a probe, ready to be compared with answers."""

    def __init__(self, told: NextToken) -> None:
        self._ranks = {int(token): rank for rank, token in enumerate(told.ids)}
        self._logprobs = [float(value) for value in told.logprobs]
        normalizers, known = told.normalizers.astype(np.float64), told.logprobs.astype(np.float64)
        self._normalizers = normalizers
        masses = np.cumsum(np.exp(known))
        nuclei = [int(np.searchsorted(masses, share)) + 1 for share in NUCLEI]
        self._counts = np.array([*nuclei, *COUNTS])  # tokens that each cut keeps
        gains = -np.log(np.minimum(masses[np.minimum(self._counts, len(masses)) - 1], 1.0))
        # a cut beyond the known tokens is never bet on
        self._is_known = self._counts <= len(known)
        self._gains = np.where(self._is_known, gains, 0.0)  # of a kept token
        others = 1.0 - masses[-1]  # mass of all tokens that are not known
        wrong = 1.0 - np.exp(np.outer(POWERS, known) - normalizers[:, None]).sum(axis=1)
        is_large = (wrong > LEAST_MASS) & (others > LEAST_MASS)
        ratios = np.where(is_large, wrong, 1.0) / np.where(is_large, others, 1.0)
        self._others = np.log(ratios)  # log-odds of a token that is not known, by power

    def logprob(self, token: int) -> float | None:
        """Log-probability of a token, None for a token that is not among the most probable."""
        rank = self._ranks.get(token)
        return None if rank is None else self._logprobs[rank]

    def bets(self, token: int) -> Odds:
        """Log-odds of a token: each wrong setting against the right setting."""
        rank, logprob = self._ranks.get(token, len(self._logprobs)), self.logprob(token)
        powers = self._others if logprob is None else EXPONENTS * logprob - self._normalizers
        cuts = np.where((rank < self._counts) | ~self._is_known, self._gains, -np.inf)
        odds: Odds = np.logaddexp(_STAYS + np.concatenate([powers, cuts]), _HEDGED)
        return odds


class ProbeCheck:
    """Compares engines' answers to probes with the learner's distributions of the same version.

    - Each log-probability must agree within `tolerance`, alone and in the mean over `GAPS` answers, and answers
      may not have been computed by the version before.
    - The log-probabilities must move as the learner's do (`_Movement`).
    - The drawn tokens must follow the distribution: a test by betting. For each wrong setting that a server could
      have, the odds of the tokens under it against the learner's distribution are multiplied
      (`ProbeDistribution.bets`). Under the right settings the mean of a factor is 1. Odds below 1 begin again at
      1, so that a late failure is found as soon.
    """

    def __init__(self, *, tolerance: Tolerance, compares: Callable[[int], bool] = lambda version: True) -> None:
        self._tolerance = tolerance
        self._compares = compares  # whether engines serve a version as published, and must agree with the learner
        self._known: dict[int, Sequence[ProbeDistribution]] = {}  # by version, in order
        self._before: dict[int, Sequence[ProbeDistribution]] = {}  # the version before
        self._first: Sequence[ProbeDistribution] | None = None
        self._waiting: defaultdict[int, list[tuple[int, ProbeAnswer]]] = defaultdict(list)  # by version
        # by replica, and whether its weights are as published
        self._movement: defaultdict[tuple[int, bool], _Movement] = defaultdict(_Movement)
        # by replica: version, probe and token of the answers to its last version
        self._moved: defaultdict[int, set[tuple[int, int, int]]] = defaultdict(set)
        self._odds: dict[str, Odds] = {}  # by replica, and of all engines together, in logs
        # likewise: differences of its last answers from the learner's version, and from the version before
        self._gaps: dict[tuple[str, bool], deque[tuple[float, float]]] = {}

    def computed(self, version: int, tokens: Sequence[NextToken]) -> Iterator[Alarm]:
        """Take the learner's distributions of a version, and judge the answers that came before them."""
        expected = [ProbeDistribution(told) for told in tokens]
        self._before[version] = next(reversed(self._known.values()), expected)
        self._known[version] = expected
        self._first = self._first or expected
        for old in list(self._known)[:-KEPT]:
            del self._known[old], self._before[old]
        for old in [waiting for waiting in self._waiting if waiting < version - KEPT]:
            del self._waiting[old]
        for replica, answer in self._waiting.pop(version, []):
            yield from self._judge(replica, answer)

    def answered(self, replica: int, answer: ProbeAnswer) -> Iterator[Alarm]:
        """Take an answer of a replica."""
        if answer.version in self._known:
            yield from self._judge(replica, answer)
        else:
            self._waiting[answer.version].append((replica, answer))
            if len(self._waiting) > KEPT:
                del self._waiting[min(self._waiting)]

    def _judge(self, replica: int, answer: ProbeAnswer) -> Iterator[Alarm]:
        part, expected = f"replica-{replica}", self._known[answer.version][answer.probe]
        logprob = expected.logprob(answer.token)
        if logprob is not None or not math.isfinite(answer.logprob):
            yield from self._compare(part, answer, logprob or 0.0)
        key = (answer.version, answer.probe, answer.token)  # equal answers are one observation
        start = None if self._first is None else self._first[answer.probe].logprob(answer.token)
        if logprob is not None and start is not None and key not in self._moved[replica]:
            if self._moved[replica] and next(iter(self._moved[replica]))[0] != answer.version:
                self._moved[replica].clear()
            self._moved[replica].add(key)
            compares = self._compares(answer.version)
            movement = self._movement[replica, compares]
            movement.add(logprob - start, answer.logprob - start)
            if movement.lags(self._tolerance.movement if compares else FAR):
                del self._movement[replica, compares]
                yield Alarm(
                    "probes",
                    part,
                    f"its log-probabilities do not move with the versions, up to {answer.version}; {RESTART}",
                )
        if not self._compares(answer.version):  # its tokens are of the rounded model
            return
        bets = expected.bets(answer.token)
        for who in (part, "all engines"):
            odds = self._odds[who] = np.maximum(self._odds.get(who, 0.0), 0.0) + bets
            if odds.max() <= math.log(ODDS * len(WRONG)):
                continue
            self._odds[who] = np.zeros(len(WRONG))
            likely = WRONG[int(odds.argmax())]
            yield Alarm(
                "sampling",
                who,
                f"tokens are drawn as with {likely}, up to version {answer.version}, not as rollout.sampling says;"
                " look at the server's defaults",
            )

    def _compare(self, part: str, answer: ProbeAnswer, logprob: float) -> Iterator[Alarm]:
        """Compare an answer with the learner's `logprob`."""
        gap = abs(answer.logprob - logprob) if math.isfinite(answer.logprob) else math.inf
        compares = self._compares(answer.version)
        gaps = self._gaps.setdefault((part, compares), deque(maxlen=GAPS))
        before = self._before[answer.version][answer.probe].logprob(answer.token)
        gaps.append((gap, gap if before is None else abs(answer.logprob - before)))
        if not compares and gap < math.inf:
            return
        own, older = (sum(side) / len(gaps) for side in zip(*gaps, strict=True))
        is_older = own > self._tolerance.rounding and older * OLDER < own
        is_apart = sum(one > self._tolerance.single for one, _ in gaps) >= self._tolerance.several
        if is_apart or not gap < math.inf or (len(gaps) == GAPS and (own > self._tolerance.mean or is_older)):
            gaps.clear()
            yield Alarm(
                "probes",
                part,
                f"gives a token log-probability {answer.logprob:.3f} under version {answer.version}, the learner"
                f" {logprob:.3f}{self._as_version(answer)}; compare model.path, the engine's flags and adapters",
            )

    @property
    def largest_mean(self) -> float:
        """Mean difference in nats over the last `GAPS` answers of the replica that differs most; NaN without any.

        Only answers of versions that are not compared count: engines round their weights.
        """
        kept = (gaps for (_, compares), gaps in self._gaps.items() if not compares and len(gaps) == GAPS)
        return max((sum(own for own, _ in gaps) / GAPS for gaps in kept), default=math.nan)

    def _as_version(self, answer: ProbeAnswer) -> str:
        """Words on an older version whose log-probability the answer has, "" without one."""
        for version in sorted(self._known, reverse=True):
            logprob = self._known[version][answer.probe].logprob(answer.token)
            if version != answer.version and logprob is not None and abs(logprob - answer.logprob) < 1e-3:
                return f", as of version {version}"
        return ""
