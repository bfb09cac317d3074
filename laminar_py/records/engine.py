"""Requests to an inference engine and what comes back; `protocols.InferenceEngine` has the calls."""

from enum import StrEnum

import msgspec

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.recordings import RoutedExperts, SamplingMask
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason


class PauseMode(StrEnum):
    """Fate of running requests under `InferenceEngine.pause` (SGLang's three modes)."""

    ABORT = "abort"  # they end, their partial response is delivered
    RETRACT = "retract"  # they go back to the queue and are prefilled again
    IN_PLACE = "in_place"  # they stop where they are and keep their KV cache


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn, e.g. `SamplingParams(max_new_tokens=344, stop_ids=(1,))`.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 leave the vocabulary whole. `max_new_tokens`
    counts all response tokens, those of a resumed prefix included. One `seed` and one position always give the
    same uniform number, whatever the request is batched with (SGLang draws freely).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to an engine: continue `prompt_ids + prefix_ids`, e.g. after an abort at token 41.

    Requests of one `group_id` share their prompt, so an engine may prefill it once. One that `has_turns` may come
    again with the same `rid` once it has stopped, and go on, so an engine may keep its KV cache.
    """

    rid: str
    group_id: str
    prompt_ids: IntArray  # [P]
    prefix_ids: IntArray  # [L so far], generated earlier
    sampling: SamplingParams
    routed: int = 0  # leading positions whose experts are recorded already
    has_turns: bool = False
    one_by_one: bool = False  # somebody waits for each token: an engine that gathers them does not here


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, all generated under `version`; the last delta has a finish reason.

    Weights that change under a running stream may leave the place of the change uncertain until it ends; then
    `spans` in the last delta is the engine's own account of the whole stream, and replaces the `version`s.
    """

    rid: str
    ids: IntArray  # [n] new response tokens, n >= 0
    logprobs: FloatArray  # [n] log-probability of the drawn token in the distribution that it was drawn from
    version: int
    finish_reason: FinishReason | None = None
    kv_version: int | None = None  # as in `Span`
    spans: tuple[Span, ...] | None = None  # [0, tokens of this stream)
    sampling_mask: SamplingMask | None = None  # n rows
    routed_experts: RoutedExperts | None = None  # in the last delta, from `GenerateRequest.routed` on


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Occupation of an engine, e.g. `EngineStatus(running=64, waiting=3, kv_used=5120, ...)`; KV in tokens.

    What an engine keeps between turns, and would drop for whatever runs, counts nowhere.
    """

    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    version: int  # -1 before the first load
