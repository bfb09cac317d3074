"""What the planners go by: the state of replicas, how fast engines are, how much of a trajectory is still to come.

Pure; fed by `repack.migration` with what replicas say of themselves and by the flow with finished lengths.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.types import Survey

Numbers = npt.NDArray[np.float64]


class EngineSpeed(msgspec.Struct, frozen=True):
    """How long an engine takes, as measured (`rollout.calibration`) or given; an H100 with 7B parameters:

    `EngineSpeed(0.02, 0.0, 8e-8, 25_000.0, roofline_batch=48)`.
    """

    step_s: float  # a decode step, whatever it decodes
    step_s_per_sequence: float  # and for each sequence in it
    step_s_per_token: float  # and for each token of KV cache that it reads
    prefill_tokens_per_s: float
    roofline_batch: int  # B: a larger batch costs more time

    def decode_s(self, *, sequences: int, kv_tokens: float) -> float:
        """One step of a batch."""
        return self.step_s + self.step_s_per_sequence * sequences + self.step_s_per_token * kv_tokens

    def rate(self, *, sequences: int, kv_tokens: float) -> float:
        """Tokens a second of a batch."""
        return sequences / self.decode_s(sequences=sequences, kv_tokens=kv_tokens)

    def prefill_s(self, tokens: float) -> float:
        """Computing the KV cache of `tokens`."""
        return tokens / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class RampDown:
    """The paper's sign that a replica idles: nothing waits, its KV use has fallen since the last look, and it
    decodes fewer than the roofline batch."""

    previous: Mapping[int, int]  # KV tokens of each replica at the last look
    roofline_batch: int

    def shows(self, survey: Survey) -> bool:
        """`C_used < min(C_max, C_prev)` and `N < B` (Laminar, section on dynamic repack)."""
        limit = min(survey.kv_capacity, self.previous.get(survey.replica, survey.kv_capacity))
        return not survey.waiting and survey.kv_used < limit and len(survey.running) < self.roofline_batch


class RemainingTokens:
    """Expected tokens still to come of a response, by a hazard that is constant inside each of a few dozen bins.

    Hazard of a bin: responses that ended in it over tokens generated in it, those of running responses included,
    so that the short ones, which end first, do not make all look short. Before there is data the prior says that
    a response goes on for as long as it has been going; it counts as one response in each bin. Finished samples
    of the same prompt are averaged in, `SIBLING_PRIOR` of the run's expectation against one of each.
    """

    BINS = 48
    FIRST_EDGE = 16
    SIBLING_PRIOR = 4.0
    WINDOW = 0.999  # what was seen fades with each finished response: the policy changes as it learns

    def __init__(self, max_tokens: int) -> None:
        first = min(self.FIRST_EDGE, max_tokens)
        self._edges = np.unique(np.concatenate([[0.0], np.geomspace(first, max_tokens, self.BINS)]))
        self._widths = np.diff(self._edges)
        middle = (self._edges[:-1] + self._edges[1:]) / 2
        self._prior_ends, self._prior_tokens = np.ones(len(middle)), middle
        self._ends = np.zeros(len(middle))
        self._tokens = np.zeros(len(middle))
        self._at_edge = np.zeros(len(self._edges))  # [bins + 1] expectation at the start of each bin
        self._hazard = np.zeros(len(middle))
        self.look(())

    def finished(self, length: int, *, capped: bool) -> None:
        """A response ended, by itself or at the cap on tokens."""
        self._ends *= self.WINDOW
        self._tokens *= self.WINDOW
        self._tokens += self._exposure(np.array([length]))
        if not capped:
            place = int(np.searchsorted(self._edges, length, side="left")) - 1
            self._ends[min(max(place, 0), len(self._ends) - 1)] += 1.0

    def look(self, running: Iterable[int]) -> None:
        """Take the lengths of all running responses into account, until the next look."""
        lengths = np.fromiter(running, np.float64)
        tokens = self._prior_tokens + self._tokens + self._exposure(lengths)
        self._hazard = (self._prior_ends + self._ends) / tokens
        survives = np.exp(-self._hazard * self._widths)
        self._at_edge[-1] = 0.0
        for place in range(len(self._widths) - 1, -1, -1):
            inside = (1 - survives[place]) / self._hazard[place]
            self._at_edge[place] = inside + survives[place] * self._at_edge[place + 1]

    def expected(self, lengths: Numbers) -> Numbers:
        """[n] tokens to come of responses that are [n] tokens long, without knowing their prompts."""
        place = np.clip(np.searchsorted(self._edges, lengths, side="right") - 1, 0, len(self._widths) - 1)
        left = np.maximum(self._edges[place + 1] - lengths, 0.0)
        survives = np.exp(-self._hazard[place] * left)
        out: Numbers = (1 - survives) / self._hazard[place] + survives * self._at_edge[place + 1]
        return out

    def of_group(self, length: int, expected: float, siblings: Sequence[int]) -> float:
        """That expectation with the finished samples of its prompt averaged in, as far as they were longer."""
        longer = [sibling - length for sibling in siblings if sibling > length]
        return (self.SIBLING_PRIOR * expected + sum(longer)) / (self.SIBLING_PRIOR + len(longer))

    def _exposure(self, lengths: Numbers) -> Numbers:
        """[bins] tokens that responses of these lengths have in each bin."""
        inside = np.clip(lengths[:, None] - self._edges[:-1], 0.0, self._widths)
        out: Numbers = inside.sum(axis=0)
        return out
