"""Typed records of SGLang's wire format: server-sent events, chunks of a stream, load. Pure.

`SGLangEngine` and its connection call it. Decoding skips unused fields. Any other mismatch raises `WireError`, so
a bad message never becomes tokens (`tests/engines/sglang/test_wire.py`).
"""

import base64
import binascii
from collections.abc import Iterator

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.pieces import RoutedExperts, SamplingMask
from laminar_py.records.spans import Span

MAX_EVENT_BYTES = 512 * 2**20  # routed experts of a long response come in one event
MAX_EXPERTS = 2**16  # of a layer
_END = b"[DONE]"


class WireError(Exception):
    """The server sent an invalid message; the text quotes it."""


class WireSpan(msgspec.Struct):
    """Weight version of the tokens [start, end) of a stream."""

    version: str
    start: int
    end: int


class WireFinish(msgspec.Struct):
    """Why a stream ended. An abort by the server has a status code."""

    type: str
    message: str = ""
    status_code: int | None = None


class Meta(msgspec.Struct, kw_only=True):
    """The metadata of a chunk."""

    weight_version: str
    finish_reason: WireFinish | None = None
    completion_tokens: int = 0  # all so far
    output_token_logprobs: list[tuple[float, int, None]] = []
    weight_versions: list[WireSpan] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    routed_experts: str | None = None  # base64 of int32


class WireFault(msgspec.Struct):
    """The error of a failed request, in its stream or as the body of an answer."""

    message: str
    code: int | str | None = None


class StreamEvent(msgspec.Struct):
    """One event of a stream: an error, or new tokens.

    A server without incremental streaming repeats all tokens.
    """

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: WireFault | None = None


class RankUse(msgspec.Struct):
    """Load of a data-parallel rank: requests, and KV cache in tokens."""

    num_running_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int


class RankUses(msgspec.Struct):
    """The answer of `/v1/loads`."""

    loads: list[RankUse]


class RankChecksum(msgspec.Struct):
    """Hash of the weights on one GPU."""

    per_gpu_checksum: str
    checksums: dict[str, str] = {}  # by tensor


class WeightsChecksums(msgspec.Struct):
    """The answer of `/weights_checker`."""

    ranks: list[RankChecksum]


class UpdateAnswer(msgspec.Struct):
    """The answer of a weight update."""

    success: bool
    message: str = ""


_decode_chunk = msgspec.json.Decoder(StreamEvent).decode


class EventSplitter:
    """Cuts a byte stream into server-sent events, e.g. `for data in splitter.feed(bytes): ...`."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the incomplete event, without `_newline`
        self._num_bytes = 0  # in them
        self._newline = b""  # the last byte, if it may be half a separator

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield the payloads of completed events. `WireError` for a too long or invalid event."""
        *events, rest = (self._newline + data).split(b"\n\n")
        if events:
            events[0] = b"".join([*self._parts, events[0]])
            self._parts, self._num_bytes = [], 0
        self._newline = b"\n" if rest.endswith(b"\n") else b""
        self._parts.append(rest.removesuffix(b"\n"))
        self._num_bytes += len(self._parts[-1])
        if self._num_bytes > MAX_EVENT_BYTES:
            raise WireError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for event in events:
            if not event.startswith(b"data:"):
                raise WireError(f"an event without data: {event[:80]!r}")
            payload = event[5:].strip()
            if payload != _END:
                yield payload


def decode_chunk(payload: bytes) -> StreamEvent:
    """Decode the JSON of a chunk. Raises `WireError` if it does not fit `StreamEvent`."""
    try:
        return _decode_chunk(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"an invalid chunk ({error}): {payload[:80]!r}") from None


def decode_tokens(chunk: StreamEvent, meta: Meta, *, received: int) -> tuple[IntArray, FloatArray]:
    """Decode new ids and log-probabilities [n] of a stream with `received` earlier tokens.

    Only `completion_tokens` gives the number of new tokens: a chunk may repeat all tokens so far, and the abort of
    a retracted request repeats the last token. With a cut vocabulary the log-probabilities are renormalised over
    it.
    """
    count = meta.completion_tokens - received
    pairs = meta.output_token_logprobs[-count:] if count else []
    ids = np.array([pair[1] for pair in pairs], np.int32)
    if count < 0 or len(ids) != count or ids.tolist() != chunk.output_ids[len(chunk.output_ids) - count :]:
        raise WireError(
            f"{len(chunk.output_ids)} tokens, {len(meta.output_token_logprobs)} log-probabilities and a count of"
            f" {meta.completion_tokens} after {received}"
        )
    if not count or meta.output_token_sampling_logprobs is None:
        return ids, np.array([pair[0] for pair in pairs], np.float32)
    return ids, np.array(meta.output_token_sampling_logprobs[-count:], np.float32)


def decode_sampling_mask(meta: Meta, *, count: int) -> SamplingMask:
    """Decode the sampling masks of the last `count` tokens."""
    rows = (meta.output_token_sampling_mask or [])[-count:] if count else []
    if len(rows) != count:
        raise WireError(f"{count} tokens with sampling masks of {len(rows)}")
    ids = [token for row in rows for token in row]
    return SamplingMask(np.array([len(row) for row in rows], np.int32), np.array(ids, np.int32))


def decode_routed_experts(text: str, *, start: int, positions: int, top_k: int) -> RoutedExperts:
    """Decode experts of `positions` tokens from position `start` on. The size gives the number of layers."""
    try:
        experts = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"routed experts that are not base64 of int32 ({error})") from None
    layers, rest = divmod(len(experts), max(positions * top_k, 1))
    if rest or not layers:
        raise WireError(f"{len(experts)} routed experts for {positions} positions of top {top_k}")
    lowest, highest = int(experts.min()), int(experts.max())
    if lowest < 0 or highest >= MAX_EXPERTS:
        raise WireError(f"routed experts {lowest} to {highest} are outside 0 to {MAX_EXPERTS - 1}")
    width = 1 if highest < 256 else 2
    return RoutedExperts(
        start=start, layers=layers, top_k=top_k, width=width, data=experts.astype(f"<u{width}").tobytes()
    )


def parse_spans(meta: Meta, *, length: int) -> list[Span]:
    """Decode the version spans of a whole stream of `length` tokens. They must cover it without gaps."""
    spans = [Span(parse_version(span.version), span.start, span.end) for span in meta.weight_versions or []]
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != length:
        raise WireError(f"versions {spans} for {length} tokens")
    return [span for span in spans if span.end > span.start]


def parse_version(text: str) -> int:
    """Parse a weight version, which the client sent as a decimal number."""
    if not text.isdecimal():
        raise WireError(f"weight version {text!r}, which this client never sent")
    return int(text)
