"""A model on a running SGLang server that gives log-probabilities of given tokens, e.g. a teacher.

The server prefills a prompt with its response and returns the log-probability of each token (`/generate` with
`return_logprob` and `logprob_start_len`, no new tokens). SGLang computes these at temperature 1 over the whole
vocabulary. Called by `workers.processes.learner`, and before a run by `preflight.teacher`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang.http import ServerConnection
from laminar_py.records.codec import BoolArray, FloatArray, IntArray
from laminar_py.records.engine import EngineLostError, RefusedError
from laminar_py.records.spans import sequences_of
from laminar_py.records.trajectory import Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")
ANSWER_S = 300.0  # for a batch, behind other clients' requests and compiling kernels
ATTEMPTS, PAUSE_S, LONGEST_PAUSE_S = 3, 1.0, 30.0  # of a call, before the second, and before any other
OUTAGE_S = 900.0  # for which a batch is repeated, as long as a server may take to start; then the process restarts
NEUTRAL = {"max_new_tokens": 0, "temperature": 1.0}


class ScoredMeta(msgspec.Struct, frozen=True):
    """Metadata of an answer: (log-probability, id, text) of each input token from `logprob_start_len` on."""

    input_token_logprobs: list[tuple[float | None, int, str | None]]  # the first has None, as has NaN


class ScoredInput(msgspec.Struct, frozen=True):
    """Answer to one input."""

    meta_info: ScoredMeta


class ServedInfo(msgspec.Struct, frozen=True):
    """The fields of `/model_info` that name the model."""

    model_path: str
    tokenizer_path: str | None = None
    weight_version: str | None = None

    @property
    def fingerprint(self) -> str:
        """Name of the weights."""
        return f"{self.model_path} {self.weight_version}"


class ServedLimits(msgspec.Struct, frozen=True):
    """The field of `/server_info` with the longest input, which is shorter than so many tokens."""

    max_req_input_len: int | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """Answer to `/tokenize`."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence of a trajectory's tree: its tokens `ids` [n + response], and which of them it answers for."""

    trajectory: str
    ids: IntArray
    places: IntArray  # [response] index of each of the last tokens in the response
    own: BoolArray  # [response] True on tokens that no other sequence answers for

    @property
    def start(self) -> int:
        """First token of which the server is asked: it has no log-probability, and the next one has."""
        return max(0, len(self.ids) - len(self.places) - 1)


class ServedModel:
    """The model of the server at `url`, as `learner.reference.FrozenModel` has one in its own memory.

    E.g. `ServedModel("http://10.0.0.5:30000", api_key=None)`. It asks for the model's name at once. A call is
    repeated, a batch through an outage of `outage_s`, then raises `EngineLostError`; if the server refuses, it
    raises `ConfigError`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        answer_s: float = ANSWER_S,
        pause_s: float = PAUSE_S,
        outage_s: float = OUTAGE_S,
    ) -> None:
        self._url, self._api_key = url, api_key
        self._answer_s, self._pause_s, self._outage_s = answer_s, pause_s, outage_s
        self.info = self.ask(lambda server: server.get("model_info", ServedInfo))

    @property
    def fingerprint(self) -> str:
        """Name of the model and its weights, when the server answered last."""
        return self.info.fingerprint

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """[L] log-probabilities of each response: NaN where the server has none, 0 with no token before.

        All sequences go in one request, and the server caches their shared prefixes.
        """
        sequences = [one for trajectory in trajectories for one in _sequences(trajectory)]
        answers = self._score(sequences)
        found = {one.id: np.zeros(len(one.response_ids), np.float32) for one in trajectories}
        for sequence, answer in zip(sequences, answers, strict=True):
            values = self._values(sequence, answer)
            found[sequence.trajectory][sequence.places[sequence.own]] = values[sequence.own]
        try:
            self.info = self.ask(lambda server: server.get("model_info", ServedInfo))
        except EngineLostError as error:  # the batch is scored; the next one asks again
            log.warning("its model has no name after a batch: %s", error)
        return list(found.values())

    def _score(self, sequences: Sequence[_Sequence]) -> list[ScoredInput]:
        """Ask for the log-probabilities of all sequences."""
        if not sequences:
            return []
        return self.ask(
            lambda server: server.post_and_decode(
                "generate",
                list[ScoredInput],
                input_ids=[one.ids.tolist() for one in sequences],
                logprob_start_len=[one.start for one in sequences],
                return_logprob=True,
                sampling_params=NEUTRAL,
            ),
            outage_s=self._outage_s,
        )

    def _values(self, sequence: _Sequence, answer: ScoredInput) -> FloatArray:
        """[response] log-probabilities in an answer. Raises `EngineLostError` if it is about other tokens."""
        scored = answer.meta_info.input_token_logprobs
        sent = sequence.ids[sequence.start :].tolist()
        named = [id for _, id, _ in scored]
        # SGLang names the last id of the vocabulary 0
        if len(named) != len(sent) or any(id not in (own, 0) for id, own in zip(named, sent, strict=True)):
            raise EngineLostError(
                f"server {self._url}: scored other tokens of {sequence.trajectory} than it was sent"
            )
        values = np.array([np.nan if value is None else value for value, _, _ in scored], np.float32)
        if len(sequence.places) == len(values):  # nothing before the first token
            values[0] = 0.0
        return values[len(values) - len(sequence.places) :]

    def tokenize(self, text: str) -> list[int]:
        """Return the ids that the server's tokenizer gives a text, without special tokens around it."""
        return self.ask(
            lambda server: server.post_and_decode("tokenize", Tokenized, prompt=text, add_special_tokens=False)
        ).tokens

    def knows(self, id: int, *, after: Sequence[int]) -> None:
        """Raise `ConfigError` unless the model has the token `id`, asked behind the tokens `after`."""
        self.ask(
            lambda server: server.post_and_decode(
                "generate",
                dict[str, msgspec.Raw],
                input_ids=list(after),
                token_ids_logprob=[id],
                return_logprob=True,
                sampling_params=NEUTRAL,
            )
        )

    @property
    def longest_input(self) -> int | None:
        """Most tokens of a sequence that the server scores; None if it does not say."""
        limit = self.ask(lambda server: server.get("server_info", ServedLimits)).max_req_input_len
        return None if limit is None else limit - 1

    def ask(self, call: Callable[[ServerConnection], Awaitable[T]], *, outage_s: float = 0.0) -> T:
        """Return the answer to a call on a new connection, and repeat it if the server fails.

        Raises `EngineLostError` if it fails `ATTEMPTS` times and for `outage_s`, `ConfigError` if the server
        refuses the call.
        """
        started = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return asyncio.run(self._call(call))
            except RefusedError as error:
                raise ConfigError(
                    f"algorithm.teacher={self._url}: {' '.join(str(error).split())}; start the server with what it"
                    " lacks, or name another"
                ) from None
            except EngineLostError as error:
                if attempt >= ATTEMPTS and time.monotonic() - started >= outage_s:
                    raise
                log.warning("attempt %d: %s", attempt, error)
                time.sleep(min(attempt * self._pause_s, LONGEST_PAUSE_S))
        raise AssertionError("an attempt returns or raises")

    async def _call(self, call: Callable[[ServerConnection], Awaitable[T]]) -> T:
        server = ServerConnection(self._url, api_key=self._api_key, timeout_s=self._answer_s)
        try:
            return await call(server)
        finally:
            await server.close()


def _sequences(trajectory: Trajectory) -> list[_Sequence]:
    """Return the sequences of a response, one for each leaf of its tree."""
    prompt, response = trajectory.prompt_ids, trajectory.response_ids
    return [
        _Sequence(
            trajectory.id,
            np.concatenate([prompt if path.has_prompt else prompt[:0], response[path.places]]),
            path.places,
            path.own,
        )
        for path in sequences_of(trajectory.spans)
    ]
