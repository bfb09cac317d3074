"""A request on an SGLang server: what is asked, and how the server's chunks become deltas. Pure.

Owned by `engines.sglang`. Tokens, log-probabilities and versions are the server's words; a chunk that does not
fit what came before is a `WireError`.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import laminar_py.engines.sglang.wire as wire
from laminar_py.records.engine import Delta, GenerateRequest
from laminar_py.records.pieces import Recording
from laminar_py.records.spans import Span, sampled_versions
from laminar_py.records.trajectory import FinishReason

# said in every request, since a server may have been started with preferences of its own
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Facts of a server that every request to it depends on."""

    vocab: int
    max_len: int
    experts_top_k: int | None = None  # of a mixture model
    record: tuple[Recording, ...] = ()
    base: Path | None = None  # folder whose weights the server began with, where adapters are added to them


@dataclass(eq=False, slots=True, kw_only=True)
class Stream:
    """From `generate` to its last delta. `wire_rid` is its name on the server."""

    served: Served
    request: GenerateRequest
    wire_rid: str
    room: int  # tokens it may still generate
    length: int = 0  # tokens received
    kv_versions: dict[int, int] = field(default_factory=dict)  # version -> oldest weights in its KV cache then
    adapter: str | None = None  # that it names, if that and not the server's weights makes its version
    aborting: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def submitted(self) -> bool:
        """True where the server may have it."""
        return bool(self.kv_versions)

    def request_body(self, version: int, *, cache: str, adapter: str | None = None) -> dict[str, object]:
        """The body of its `/generate` under the server's present version; `cache` names its prefix cache."""
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
                "max_new_tokens": self.room,
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": not sampling.stop_ids,  # it ignores stop ids too
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
        """New weights came under it during a pause; its KV cache is computed again, or stays."""
        self.kv_versions[version] = version if recomputed else min(self.kv_versions.values())

    def delta(self, chunk: wire.StreamEvent, meta: wire.Meta) -> Delta:
        """The new tokens of a chunk that has no fault."""
        ids, logprobs = wire.tokens(chunk, meta, received=self.length)
        self.length += len(ids)
        version = self._version(meta)
        delta = Delta(
            rid=self.request.rid, ids=ids, logprobs=logprobs, version=version, kv_version=self._kv_version(version)
        )
        if Recording.SAMPLING_MASK in self.served.record:
            mask = wire.sampling_mask(meta, count=len(ids))
            delta = msgspec.structs.replace(delta, sampling_mask=mask)
        return delta if meta.finish_reason is None else self._last(delta, meta, meta.finish_reason)

    def _last(self, delta: Delta, meta: wire.Meta, finish: wire.WireFinish) -> Delta:
        if self.adapter is None:
            delta = self._restamped(delta, wire.spans(meta, length=self.length))
        top_k = self.served.experts_top_k
        start = self.request.routed
        end = len(self.request.prompt_ids) + len(self.request.prefix_ids) + self.length - 1
        if meta.routed_experts is not None and top_k is not None and end > start:
            experts = wire.routed_experts(meta.routed_experts, start=start, positions=end - start, top_k=top_k)
            delta = msgspec.structs.replace(delta, routed_experts=experts)
        try:
            reason = FinishReason(finish.type)
        except ValueError:
            raise wire.WireError(f"finish reason {finish.type!r}") from None
        return msgspec.structs.replace(delta, finish_reason=reason)

    def _version(self, meta: wire.Meta) -> int:
        """Version of new tokens: that of its adapter, whatever base that is on, or what the server says."""
        return wire.version(meta.weight_version) if self.adapter is None else min(self.kv_versions)

    def _restamped(self, delta: Delta, spans: list[Span]) -> Delta:
        """The last delta, with the engine's own account where weights changed under the stream."""
        if len(self.kv_versions) == 1:
            if {span.version for span in spans} - self.kv_versions.keys():
                raise wire.WireError(f"versions {spans} in a stream of {list(self.kv_versions)}")
            return delta
        sure = tuple(
            Span(version, s.start, s.end, self._kv_version(version))
            for s, version in zip(spans, sampled_versions(spans), strict=True)
        )
        return msgspec.structs.replace(delta, spans=sure)

    def _kv_version(self, version: int) -> int | None:
        """Oldest weights in the KV cache behind tokens of `version`, where older."""
        oldest = self.kv_versions.get(version, version)
        return oldest if oldest < version else None
