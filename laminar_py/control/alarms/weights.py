"""Alarms on weights: published versions, the tensors of engines, and their probabilities. Pure."""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.events import AnyEvent, Stepped, VersionLoaded, VersionPublished
from laminar_py.records.proofs import POWERS, Alarm, NextToken, ProbeAnswer

Odds: TypeAlias = npt.NDArray[np.float64]  # [len(WRONG)] in logs

RESTART = "restart the engine's server, or set rollout.engine otherwise, and --resume"


class WeightsCheck:
    """Compares digests of published versions with the hashes of the tensors that engines then serve."""

    takes: ClassVar[tuple[type, ...]] = (Stepped, VersionPublished, VersionLoaded)

    def __init__(self) -> None:
        self._published: VersionPublished | None = None
        self._learned = 0  # steps that changed weights since the last version
        self._loaded: dict[int, VersionLoaded] = {}  # replica -> last load with a hash

    def observe(self, event: AnyEvent, row: LiveTrajectory | None) -> Iterator[Alarm]:
        """Take an event in the order of the log."""
        if isinstance(event, Stepped):
            self._learned += event.num_trajectories > 0 and event.grad_norm > 0
        elif isinstance(event, VersionPublished):
            before, self._published = self._published, event
            if before is not None and before.digest == event.digest and self._learned and event.parent is not None:
                yield Alarm(
                    "weights",
                    "learner",
                    f"version {event.version} has the bytes of version {before.version}, after {self._learned}"
                    " steps with gradients: the updates are lost, or smaller than the published type can hold;"
                    " raise learner.lr",
                )
            self._learned = 0
        elif isinstance(event, VersionLoaded) and event.checksum is not None:
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


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference of log-probabilities between engine and learner, in nats."""

    single: float  # of one answer
    mean: float  # over `GAPS` answers
    rounding: float  # below which a mean difference says nothing


EXACT = Tolerance(0.02, 0.01, 1e-5)  # engine and learner in fp32
ROUNDED = Tolerance(0.75, 0.2, 2e-3)  # either in bf16


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

    @property
    def lags(self) -> bool:
        """Whether the engine surely follows less than half of the learner's movement."""
        if self.count < 16 or not self.xx:
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


class ProbeDistribution:
    """The learner's distribution after a probe, ready to be compared with answers."""

    def __init__(self, told: NextToken) -> None:
        self._ranks = {int(token): rank for rank, token in enumerate(told.ids)}
        self._logprobs = [float(value) for value in told.logprobs]
        self._normalizers = told.normalizers.astype(np.float64)
        masses = np.cumsum(np.exp(told.logprobs.astype(np.float64)))
        nuclei = [int(np.searchsorted(masses, share)) + 1 for share in NUCLEI]
        self._counts = np.array([*nuclei, *COUNTS])  # tokens that each cut keeps
        self._gains = -np.log(masses[np.minimum(self._counts, len(masses)) - 1])  # of a kept token

    def logprob(self, token: int) -> float:
        """Log-probability of a token; a token below all known tokens has the last value."""
        return self._logprobs[self._ranks.get(token, -1)]

    def bets(self, token: int) -> Odds:
        """Log-odds of a token: each wrong setting against the right setting."""
        rank = self._ranks.get(token, len(self._logprobs))
        powers = EXPONENTS * self.logprob(token) - self._normalizers
        cuts = np.where(rank < self._counts, self._gains, -np.inf)
        odds: Odds = np.logaddexp(_STAYS + np.concatenate([powers, cuts]), _HEDGED)
        return odds


class ProbeCheck:
    """Compares engines' answers to probes with the learner's distributions of the same version.

    - Each log-probability must agree within `tolerance`, alone and in the mean over `GAPS` answers, and answers
      may not have been computed by the version before.
    - The log-probabilities must move as the learner's do (`_Movement`).
    - The drawn tokens must follow the distribution: a test by betting. For each wrong setting that a server could
      have (`_bets`), the odds of the tokens under it against the learner's distribution are multiplied. Under the
      right settings the mean of a factor is 1. Odds below 1 begin again at 1, so that a late failure is found as
      soon.
    """

    def __init__(self, *, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._known: dict[int, Sequence[ProbeDistribution]] = {}  # by version, in order
        self._before: dict[int, Sequence[ProbeDistribution]] = {}  # the version before
        self._first: Sequence[ProbeDistribution] | None = None
        self._waiting: defaultdict[int, list[tuple[int, ProbeAnswer]]] = defaultdict(list)  # by version
        self._movement: defaultdict[int, _Movement] = defaultdict(_Movement)  # by replica
        self._odds: dict[str, Odds] = {}  # by replica, and of all engines together, in logs
        # by replica: differences of its last answers from the learner's version, and from the version before
        self._gaps: dict[int, deque[tuple[float, float]]] = {}

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

    def _judge(self, replica: int, answer: ProbeAnswer) -> Iterator[Alarm]:
        part, expected = f"replica-{replica}", self._known[answer.version][answer.probe]
        logprob = expected.logprob(answer.token)
        gap = abs(answer.logprob - logprob) if math.isfinite(answer.logprob) else math.inf
        gaps = self._gaps.setdefault(replica, deque(maxlen=GAPS))
        gaps.append((gap, abs(answer.logprob - self._before[answer.version][answer.probe].logprob(answer.token))))
        own, before = (sum(side) / len(gaps) for side in zip(*gaps, strict=True))
        is_full = len(gaps) == gaps.maxlen
        is_older = own > self._tolerance.rounding and before * OLDER < own
        if gap > self._tolerance.single or (is_full and (own > self._tolerance.mean or is_older)):
            gaps.clear()
            yield Alarm(
                "probes",
                part,
                f"gives a token log-probability {answer.logprob:.3f} under version {answer.version}, the learner"
                f" {logprob:.3f}{self._as_version(answer)}; compare model.path, the engine's flags and adapters",
            )
        if self._first is not None:
            start = self._first[answer.probe].logprob(answer.token)
            movement = self._movement[replica]
            movement.add(logprob - start, answer.logprob - start)
            if movement.lags:
                self._movement[replica] = _Movement()
                yield Alarm(
                    "probes",
                    part,
                    f"its log-probabilities do not move with the versions, up to {answer.version}; {RESTART}",
                )
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

    def _as_version(self, answer: ProbeAnswer) -> str:
        """Words on an older version whose log-probability the answer has, "" without one."""
        for version in sorted(self._known, reverse=True):
            near = abs(self._known[version][answer.probe].logprob(answer.token) - answer.logprob)
            if version != answer.version and near < 1e-3:
                return f", as of version {version}"
        return ""
