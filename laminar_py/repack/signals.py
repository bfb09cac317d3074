"""Signals for planners: engine speed, and expected remaining response tokens.

Pure. `repack.migration` feeds them surveys and the lengths of finished responses.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.replica import TrajectorySummary

Numbers = npt.NDArray[np.float64]


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of an engine, measured by `rollout.calibration` or given.

    E.g. an H100 with 7B parameters: 20 ms a decode step, 80 ns per token of KV cache, 25,000 prefill tokens a
    second.
    """

    step_s: float  # seconds of a decode step, before the additions below
    step_s_per_sequence: float  # seconds added for each sequence in the batch
    step_s_per_token: float  # seconds added for each token of KV cache read
    prefill_tokens_per_s: float

    def decode_s(self, *, sequences: int, kv_tokens: float) -> float:
        """Return seconds of one decode step of `sequences` sequences with `kv_tokens` tokens of KV cache."""
        return self.step_s + self.step_s_per_sequence * sequences + self.step_s_per_token * kv_tokens

    def rate(self, *, sequences: int, kv_tokens: float) -> float:
        """Return generated tokens a second of `sequences` sequences with `kv_tokens` tokens of KV cache."""
        return sequences / self.decode_s(sequences=sequences, kv_tokens=kv_tokens)

    def prefill_s(self, tokens: float) -> float:
        """Return seconds to compute the KV cache of `tokens`."""
        return tokens / self.prefill_tokens_per_s


class RemainingTokens:
    """Expected remaining tokens of a response, by its hazard: the chance per token that the response ends.

    The hazard is constant in each of `BINS` bins of response length: the number of responses that ended in the bin
    over the tokens generated in it. Tokens of running responses count too, since short responses end first and
    would bias the hazard. The prior, which weighs one response per bin, expects as many further tokens as a
    response has. Older observations decay with each finished response, since the policy changes.
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
        self._new: list[tuple[int, bool]] = []  # (length, ended by the cap) since the last update
        self._at_edge = np.zeros(len(self._edges))  # [bins + 1] expectation at the start of each bin
        self._hazard = np.zeros(len(middle))
        self.update(())

    @property
    def of_new(self) -> float:
        """Expected tokens of a new response."""
        return float(self._at_edge[0])

    def finished(self, length: int, *, capped: bool) -> None:
        """Note the length of a response that ended by itself or at the cap, for the next update."""
        self._new.append((length, capped))
        if len(self._new) == self.MOST_NEW:
            self._fold()

    def update(self, running: Sequence[int]) -> None:
        """Recompute the hazards from the finished responses and from the lengths of the `running` responses."""
        self._fold()
        tokens = self._prior_tokens + self._tokens + self._generated(np.sort(np.array(running, np.float64)))
        self._hazard = (self._prior_ends + self._ends) / tokens
        survives = np.exp(-self._hazard * self._widths)
        self._at_edge[-1] = 0.0
        for place in range(len(self._widths) - 1, -1, -1):
            inside = (1 - survives[place]) / self._hazard[place]
            self._at_edge[place] = inside + survives[place] * self._at_edge[place + 1]

    def expected(self, lengths: Numbers) -> Numbers:
        """Return [n] expected remaining tokens of responses with [n] `lengths`."""
        place = np.clip(np.searchsorted(self._edges, lengths, side="right") - 1, 0, len(self._widths) - 1)
        left = np.maximum(self._edges[place + 1] - lengths, 0.0)
        survives = np.exp(-self._hazard[place] * left)
        out: Numbers = (1 - survives) / self._hazard[place] + survives * self._at_edge[place + 1]
        return out

    def _fold(self) -> None:
        """Add the new finished responses to the sums of each bin, with the decay of adding them one by one."""
        if not self._new:
            return
        lengths = np.array([length for length, _ in self._new], np.float64)
        ended = np.array([not capped for _, capped in self._new], np.float64)
        keeps = self._keep ** np.arange(len(lengths) - 1, -1, -1)  # [n] weight of each; the last has weight 1
        fade = self._keep ** len(lengths)
        in_bins = np.clip(lengths[:, None] - self._edges[:-1], 0.0, self._widths)  # [n, bins]
        places = np.clip(np.searchsorted(self._edges, lengths, side="left") - 1, 0, len(self._ends) - 1)
        self._tokens = self._tokens * fade + keeps @ in_bins
        self._ends = self._ends * fade + np.bincount(places, weights=keeps * ended, minlength=len(self._ends))
        self._new.clear()

    def _generated(self, ascending: Numbers) -> Numbers:
        """Return [bins] how many tokens responses of these lengths, in `ascending` order, have in each bin."""
        below = np.searchsorted(ascending, self._edges, side="right")
        sums = np.concatenate([[0.0], np.cumsum(ascending)])
        up_to = sums[below] + self._edges * (len(ascending) - below)  # [bins + 1] tokens before each edge
        out: Numbers = np.diff(up_to)
        return out


class GroupForecast:
    """`RemainingTokens`, scaled by the lengths of finished samples of the same prompt.

    If a group's finished samples are longer than the run's average, its running samples are expected to be longer
    too. The run's average weighs as much as `PRIOR` samples.
    """

    PRIOR = 4.0

    def __init__(self, remaining: RemainingTokens, finished: Callable[[str], Sequence[int]]) -> None:
        self._remaining = remaining
        self._finished = finished  # lengths of finished samples in a trajectory's group

    def __call__(self, held: Sequence[TrajectorySummary], /) -> Numbers:
        """Return [n] expected remaining tokens of the responses of `held`, n trajectories on replicas."""
        expected = self._remaining.expected(np.array([item.length for item in held], np.float64))
        average = self._remaining.of_new
        prior = self.PRIOR * average
        siblings = map(self._finished, [item.trajectory_id for item in held])
        expected *= [(prior + sum(them)) / (prior + len(them) * average) if them else 1.0 for them in siblings]
        return expected
