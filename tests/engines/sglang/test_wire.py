"""What SGLang says on the wire, in whatever pieces it comes."""

import base64
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.engines.sglang.stream import Served, Stream
from laminar_py.engines.sglang.wire import MAX_EXPERTS, EventSplitter, WireError, decode_routed_experts
from laminar_py.records.engine import GenerateRequest, SamplingParams

PAYLOADS = st.lists(st.text("ab{}\n ", max_size=8).map(str.strip).filter(lambda text: "\n\n" not in text))


def feed(pieces) -> list[bytes]:
    splitter = EventSplitter()
    return [payload for piece in pieces for payload in splitter.feed(piece)]


@given(PAYLOADS, st.lists(st.integers(0, 99)))
def test_any_cutting_of_the_bytes_gives_the_same_events(payloads, cuts):
    whole = b"".join(f"data: {payload}\n\n".encode() for payload in payloads)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[start:end] for start, end in itertools.pairwise(places)]
    assert feed(pieces) == [payload.encode() for payload in payloads]


@given(st.lists(st.sampled_from([b"\n", b"\n\n", b"data: a", b"b"]), max_size=12))
def test_cutting_changes_nothing_about_nonsense_either(pieces):
    def outcome(pieces):
        try:
            return feed(pieces)
        except WireError:
            return WireError

    assert outcome(pieces) == outcome([b"".join(pieces)])


def test_a_large_event_comes_whole():
    event = bytes(32 * 2**20).replace(b"\0", b"x")
    data = b"data: " + event + b"\n\n"
    pieces = [data[start : start + 2**16] for start in range(0, len(data), 2**16)]
    assert feed(pieces) == [event]


def test_an_event_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr("laminar_py.engines.sglang.wire.MAX_EVENT_BYTES", 10)
    assert feed([b"data: 12\n", b"\n"]) == [b"12"]
    with pytest.raises(WireError, match="more than 10 bytes"):
        feed([b"data: 1", b"2345"])


def test_each_request_carries_its_own_seed_for_the_deterministic_mode():
    def seed_of(seed):
        ids = np.arange(3, dtype=np.int32)
        sampling = SamplingParams(max_new_tokens=4, seed=seed)
        request = GenerateRequest(rid="g.0", group_id="g", prompt_ids=ids, prefix_ids=ids[:0], sampling=sampling)
        stream = Stream(served=Served(vocab=9, max_len=8), request=request, wire_rid="g.0#", room=4)
        return stream.generate_body(1, cache="c")["sampling_params"]["sampling_seed"]

    assert [seed_of(seed) for seed in (0, 7, 2**63 - 1)] == [0, 7, 2**63 - 1]


@pytest.mark.parametrize("stray", [-1, MAX_EXPERTS])
def test_experts_that_no_layer_has_are_refused(stray):
    def encoded(*ids):
        return base64.b64encode(np.array(ids, np.int32).tobytes()).decode()

    assert decode_routed_experts(encoded(0, MAX_EXPERTS - 1), start=0, positions=1, top_k=2).width == 2
    with pytest.raises(WireError, match="routed experts"):
        decode_routed_experts(encoded(3, stray), start=0, positions=1, top_k=2)
