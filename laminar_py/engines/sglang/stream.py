"""A request on an SGLang server: its `/generate` body, and the conversion of the server's chunks to deltas. Pure.

`SGLangEngine` owns it. Tokens, log-probabilities and versions come from the server. A chunk that contradicts
earlier chunks is a `WireError`.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from laminar_py.engines.sglang.wire import (
    Meta,
    StreamEvent,
    WireError,
    WireFinish,
    decode_routed_experts,
    decode_sampling_mask,
    decode_tokens,
    parse_spans,
    parse_version,
)
from laminar_py.records.engine import Delta, GenerateRequest
from laminar_py.records.pieces import Recording
from laminar_py.records.spans import Span, sampled_versions
from laminar_py.records.trajectory import FinishReason

# sent with every request, since a running server may have other defaults
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Facts about a server that all its requests share."""

    vocab: int
    max_len: int
    experts_top_k: int | None = None  # of a mixture model
    record: tuple[Recording, ...] = ()
    base: Path | None = None  # folder of the base weights of adapters


@dataclass(eq=False, slots=True, kw_only=True)
class Stream:
    """The state of one request, from `generate` to its last delta. `wire_rid` is its name on the server."""

    served: Served
    request: GenerateRequest
    wire_rid: str
    room: int  # tokens it may still generate
    length: int = 0  # tokens received
    kv_versions: dict[int, int] = field(default_factory=dict)  # version -> oldest weights in the KV cache under it
    adapter: str | None = None  # its adapter, which then gives its version
    aborting: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def submitted(self) -> bool:
        """True if the server may have the request."""
        return bool(self.kv_versions)

    def generate_body(self, version: int, *, cache: str, adapter: str | None = None) -> dict[str, object]:
        """Build the body of `/generate` for prefix cache `cache`, and mark the request as submitted."""
        self.kv_versions[version] = version
        self.adapter = adapter
        request, sampling, record = self.request, self.request.sampling, self.served.record
        body: dict[str, object] = {
            "rid": self.wire_rid,
            "input_ids": [*request.prompt_ids.tolist(), *request.prefix_ids.tolist()],
            "sampling_params": {
                **_NEUTRAL,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "top_k": sampling.top_k or -1,
                "sampling_seed": sampling.seed,  # without one the deterministic mode gives all samples one seed
                "max_new_tokens": self.room,
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": not sampling.stop_ids,  # with True the server ignores stop ids as well
            },
            "return_logprob": True,
            "stream": True,
            "extra_key": cache,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        if Recording.SAMPLING_MASK in record:
            body["return_sampling_mask"] = True
        if Recording.ROUTED_EXPERTS in record:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.routed}
        return body

    def loaded(self, version: int, *, recomputed: bool) -> None:
        """Record that `version` was loaded under this request, whose KV cache is recomputed or stays."""
        self.kv_versions[version] = version if recomputed else min(self.kv_versions.values())

    def delta(self, chunk: StreamEvent, meta: Meta) -> Delta:
        """Convert a chunk to the delta of its new tokens. `WireError` if it contradicts earlier chunks."""
        ids, logprobs = decode_tokens(chunk, meta, received=self.length)
        self.length += len(ids)
        version = self._version(meta)
        delta = Delta(
            rid=self.request.rid, ids=ids, logprobs=logprobs, version=version, kv_version=self._kv_version(version)
        )
        if Recording.SAMPLING_MASK in self.served.record:
            mask = decode_sampling_mask(meta, count=len(ids))
            delta = msgspec.structs.replace(delta, sampling_mask=mask)
        return delta if meta.finish_reason is None else self._last(delta, meta, meta.finish_reason)

    def _last(self, delta: Delta, meta: Meta, finish: WireFinish) -> Delta:
        """Complete the last delta of a stream with corrected versions, routed experts and the finish reason.

        Raises `WireError` if versions, experts or reason are invalid.
        """
        if self.adapter is None:
            delta = self._restamped(delta, parse_spans(meta, length=self.length))
        top_k = self.served.experts_top_k
        start = self.request.routed
        end = len(self.request.prompt_ids) + len(self.request.prefix_ids) + self.length - 1
        if meta.routed_experts is not None and top_k is not None and end > start:
            experts = decode_routed_experts(meta.routed_experts, start=start, positions=end - start, top_k=top_k)
            delta = msgspec.structs.replace(delta, routed_experts=experts)
        try:
            reason = FinishReason(finish.type)
        except ValueError:
            raise WireError(f"finish reason {finish.type!r}") from None
        return msgspec.structs.replace(delta, finish_reason=reason)

    def _version(self, meta: Meta) -> int:
        """Version of new tokens: the version of the adapter if there is one, else the version in the chunk."""
        return parse_version(meta.weight_version) if self.adapter is None else min(self.kv_versions)

    def _restamped(self, delta: Delta, spans: list[Span]) -> Delta:
        """Add the server's final `spans` to the last delta if weights changed under it, else only check them."""
        if len(self.kv_versions) == 1:
            if {span.version for span in spans} - self.kv_versions.keys():
                raise WireError(f"versions {spans} in a stream of {list(self.kv_versions)}")
            return delta
        sure = tuple(
            Span(version, s.start, s.end, self._kv_version(version))
            for s, version in zip(spans, sampled_versions(spans), strict=True)
        )
        return msgspec.structs.replace(delta, spans=sure)

    def _kv_version(self, version: int) -> int | None:
        """Oldest weights in the KV cache behind tokens of `version`; None if they are not older."""
        oldest = self.kv_versions.get(version, version)
        return oldest if oldest < version else None
