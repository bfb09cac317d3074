"""Signals for planners: the state of replicas, the speed of engines, how much of a trajectory is still to come.

Pure; fed by `repack.migration` with what replicas say of themselves and the lengths of finished responses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.replica import Held, Survey

Numbers = npt.NDArray[np.float64]


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Time that an engine takes, as measured (`rollout.calibration`) or given; e.g. of an H100 with 7B
    parameters 20 ms a step, 80 ns for each token of KV cache, 25,000 tokens of prefill a second, batch 48.
    """

    step_s: float  # a decode step, whatever it decodes
    step_s_per_sequence: float  # and for each sequence in it
    step_s_per_token: float  # and for each token of KV cache that it reads
    prefill_tokens_per_s: float
    roofline_batch: int  # B: a larger batch costs more time

    def decode_s(self, *, sequences: int, kv_tokens: float) -> float:
        """Seconds of one step of a batch."""
        return self.step_s + self.step_s_per_sequence * sequences + self.step_s_per_token * kv_tokens

    def rate(self, *, sequences: int, kv_tokens: float) -> float:
        """Tokens a second of a batch."""
        return sequences / self.decode_s(sequences=sequences, kv_tokens=kv_tokens)

    def prefill_s(self, tokens: float) -> float:
        """Seconds to compute the KV cache of `tokens`."""
        return tokens / self.prefill_tokens_per_s

    def keeping_to(self, roofline_batch: int | None) -> "EngineSpeed":
        """Speed with the roofline batch that a run was given in place of the measured one, if any."""
        return self if roofline_batch is None else msgspec.structs.replace(self, roofline_batch=roofline_batch)


@dataclass(frozen=True, slots=True)
class RampDown:
    """The paper's sign that a replica idles: nothing waits, its KV use has fallen since the last look, and it
    decodes fewer than the roofline batch."""

    previous: Mapping[int, int]  # KV tokens of each replica at the last look
    roofline_batch: int

    def shows(self, survey: Survey) -> bool:
        """`C_used < min(C_max, C_prev)` and `N < B` (Laminar, its dynamic repack); never at the first look."""
        limit = min(survey.kv_capacity, self.previous.get(survey.replica, 0))
        return not survey.waiting and survey.kv_used < limit and len(survey.running) < self.roofline_batch


class RemainingTokens:
    """Expected tokens still to come of a response, by a hazard that is constant inside each of a few dozen bins.

    Hazard of a bin: responses that ended in it over tokens generated in it, those of running responses included,
    so that the short ones, which end first, do not make all look short. Before there is data the prior says that
    a response goes on for as long as it has been going; it counts as one response in each bin. What was seen fades
    with each finished response, since the policy changes as it learns.
    """

    BINS = 48
    FIRST_EDGE = 16
    MOST_NEW = 4096

    def __init__(self, max_tokens: int, *, keep: float = 0.999) -> None:
        first = min(self.FIRST_EDGE, max_tokens)
        self._edges = np.unique(np.concatenate([[0.0], np.geomspace(first, max_tokens, self.BINS)]))
        self._widths = np.diff(self._edges)
        self._keep = keep
        middle = (self._edges[:-1] + self._edges[1:]) / 2
        self._prior_ends, self._prior_tokens = np.ones(len(middle)), middle
        self._ends = np.zeros(len(middle))
        self._tokens = np.zeros(len(middle))
        self._new: list[tuple[int, bool]] = []  # lengths since the last look, and whether the cap ended each
        self._at_edge = np.zeros(len(self._edges))  # [bins + 1] expectation at the start of each bin
        self._hazard = np.zeros(len(middle))
        self.look(())

    @property
    def of_new(self) -> float:
        """Expected tokens of a response that begins."""
        return float(self._at_edge[0])

    def finished(self, length: int, *, capped: bool) -> None:
        """Take in the length of a response that ended, by itself or at the cap on tokens, for the next look."""
        self._new.append((length, capped))
        if len(self._new) == self.MOST_NEW:
            self._fold()

    def look(self, running: Sequence[int]) -> None:
        """Take the lengths of running responses that were asked for into account, until the next look."""
        self._fold()
        tokens = self._prior_tokens + self._tokens + self._generated(np.sort(np.array(running, np.float64)))
        self._hazard = (self._prior_ends + self._ends) / tokens
        survives = np.exp(-self._hazard * self._widths)
        self._at_edge[-1] = 0.0
        for place in range(len(self._widths) - 1, -1, -1):
            inside = (1 - survives[place]) / self._hazard[place]
            self._at_edge[place] = inside + survives[place] * self._at_edge[place + 1]

    def expected(self, lengths: Numbers) -> Numbers:
        """[n] tokens to come of responses that are [n] tokens long."""
        place = np.clip(np.searchsorted(self._edges, lengths, side="right") - 1, 0, len(self._widths) - 1)
        left = np.maximum(self._edges[place + 1] - lengths, 0.0)
        survives = np.exp(-self._hazard[place] * left)
        out: Numbers = (1 - survives) / self._hazard[place] + survives * self._at_edge[place + 1]
        return out

    def _fold(self) -> None:
        """Take in what has ended, each as fading as if it had been taken in alone."""
        if not self._new:
            return
        lengths = np.array([length for length, _ in self._new], np.float64)
        ended = np.array([not capped for _, capped in self._new], np.float64)
        keeps = self._keep ** np.arange(len(lengths) - 1, -1, -1)  # [n] the last one is kept whole
        fade = self._keep ** len(lengths)
        in_bins = np.clip(lengths[:, None] - self._edges[:-1], 0.0, self._widths)  # [n, bins]
        places = np.clip(np.searchsorted(self._edges, lengths, side="left") - 1, 0, len(self._ends) - 1)
        self._tokens = self._tokens * fade + keeps @ in_bins
        self._ends = self._ends * fade + np.bincount(places, weights=keeps * ended, minlength=len(self._ends))
        self._new.clear()

    def _generated(self, ascending: Numbers) -> Numbers:
        """[bins] tokens that responses of these lengths have in each bin."""
        below = np.searchsorted(ascending, self._edges, side="right")
        sums = np.concatenate([[0.0], np.cumsum(ascending)])
        up_to = sums[below] + self._edges * (len(ascending) - below)  # [bins + 1] tokens before each edge
        out: Numbers = np.diff(up_to)
        return out


class GroupForecast:
    """`RemainingTokens` with what the finished samples of each one's prompt say.

    A group whose finished samples are twice as long as the run's average is expected to be longer altogether; the
    run's average counts as `PRIOR` samples against them.
    """

    PRIOR = 4.0

    def __init__(self, remaining: RemainingTokens, finished: Callable[[str], Sequence[int]]) -> None:
        self._remaining = remaining
        self._finished = finished  # lengths of the finished siblings of a trajectory

    def __call__(self, held: Sequence[Held], /) -> Numbers:
        """[n] tokens to come of their responses."""
        expected = self._remaining.expected(np.array([item.length for item in held], np.float64))
        average = self._remaining.of_new
        prior = self.PRIOR * average
        siblings = map(self._finished, [item.trajectory_id for item in held])
        expected *= [(prior + sum(them)) / (prior + len(them) * average) if them else 1.0 for them in siblings]
        return expected
