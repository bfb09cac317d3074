"""Lossless for any bytes, small for the steps of an optimizer, and harmless when somebody lies."""

import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laminar_py.relay.delta import DeltaError, apply, encode
from tests.depth import examples
from tests.relay.delta_builders import HEADER, NUM_PLANES, Forgery, weights

GUARD = 64  # bytes on both sides of what may be written
WIDTHS = pytest.mark.parametrize("width", [2, 4])


def width_of(payload: bytes) -> int:
    """The width that the payload was made with, where it says one that exists."""
    return 4 if payload[1:2] == b"\x04" else 2


def applied(payload: bytes, base: bytes) -> bytes:
    """What `apply` makes of it, after a look at the bytes around its output."""
    arena = bytearray(b"\xa5" * (len(base) + 2 * GUARD))
    inside = memoryview(arena)[GUARD : GUARD + len(base)]
    inside[:] = base
    try:
        apply(payload, inside, width=width_of(payload))
    except DeltaError:
        assert inside == base, "written although refused"
        raise
    finally:
        assert arena[:GUARD] == arena[-GUARD:] == b"\xa5" * GUARD, "written outside"
    return bytes(inside)


def forgery(width: int = 2) -> tuple[Forgery, bytes]:
    """A good payload, to be spoiled, and its base; changes near and far, and a tail."""
    new, base = weights(40_001, width=width, density=0.004)
    payload = encode(new, base, width=width)
    assert payload
    return Forgery.of(payload), base


@settings(deadline=None, max_examples=examples(300))
@given(
    n=st.integers(0, 300) | st.integers(0, 700_000),
    width=st.sampled_from([2, 4]),
    density=st.sampled_from([0.0, 1e-5, 1e-3, 0.0128, 0.1, 0.19, 0.21, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_chunk_comes_back_bit_for_bit(n: int, width: int, density: float, seed: int) -> None:
    new, base = weights(n, width=width, density=density, seed=seed)
    payload = encode(new, base, width=width)
    assert (payload == b"") == (new == base)
    if payload is not None:
        assert len(payload) < max(n, 1)
        assert applied(payload, base) == new


@settings(deadline=None, max_examples=examples(200))
@given(
    base=st.binary(min_size=600, max_size=800),
    edits=st.dictionaries(st.integers(0, 599), st.binary(min_size=1, max_size=9), max_size=8),
    width=st.sampled_from([2, 4]),
)
@example(base=b"\x00\x80" * 400, edits={0: b"\x00\x00\x00\x80\xff\xff\xc0\x7f"}, width=2)  # -0, 0, NaN
@example(base=b"\x00" * 800, edits={0: b"\x00\x00\x00\x80", 796: b"\xff\xff\xff\x7f"}, width=4)
def test_bytes_that_are_no_weights_come_back_too(base: bytes, edits: dict[int, bytes], width: int) -> None:
    new = bytearray(base)
    for start, data in edits.items():
        new[start : start + len(data)] = data
    payload = encode(new[: len(base)], base, width=width)
    assert payload is not None
    assert applied(payload, base) == new[: len(base)]


@WIDTHS
def test_every_difference_of_two_elements_comes_back(width: int) -> None:
    edges = np.array([0, 1, 2**7, 2**8, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1])
    edges = edges[edges < 256**width]
    pairs = np.zeros((len(edges), len(edges), 300), f"<u{width}")
    new = pairs.copy()
    pairs[:, :, 0], new[:, :, 0] = edges[:, None], edges
    payload = encode(new.tobytes(), pairs.tobytes(), width=width)
    assert payload
    assert applied(payload, pairs.tobytes()) == new.tobytes()


@WIDTHS
@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 510, 131_071, 131_072, 400_000])
def test_a_gap_of_any_length_comes_back(width: int, gap: int) -> None:
    base = np.zeros(gap + 202, f"<u{width}")
    new = base.copy()
    new[[100, 101 + gap]] = 1
    payload = encode(new.tobytes(), base.tobytes(), width=width)
    assert payload
    assert applied(payload, base.tobytes()) == new.tobytes()


@WIDTHS
def test_a_tail_shorter_than_an_element_may_be_all_that_changed(width: int) -> None:
    base = bytes(999)
    new = base[:-1] + b"\x01"
    payload = encode(new, base, width=width)
    assert payload
    assert applied(payload, base) == new


@WIDTHS
def test_views_at_odd_addresses_do(width: int) -> None:
    new, base = weights(100_000, width=width, density=0.01)
    views = [memoryview(b"x" + data)[1:] for data in (new, base)]
    payload = encode(views[0], views[1], width=width)
    assert payload
    assert payload == encode(new, base, width=width)
    assert applied(payload, views[1]) == new


def test_a_payload_of_another_width_is_refused() -> None:
    good, base = forgery(2)
    with pytest.raises(DeltaError, match="elements of 2 bytes, not 4"):
        apply(good.bytes(), memoryview(bytearray(base)), width=4)


def test_payloads_of_successive_versions_apply_one_after_the_other() -> None:
    versions = [weights(1_000_001, width=2, density=0.01)[1]]
    for seed in range(3):
        moved = np.frombuffer(versions[-1], "<u2", 500_000).copy()
        moved[np.random.default_rng(seed).integers(0, len(moved), 3000)] += 1
        versions.append(moved.tobytes() + bytes([seed]))
    pages = memoryview(bytearray(versions[0]))
    for old, new in pairwise(versions):
        payload = encode(new, old, width=2)
        assert payload
        apply(payload, pages, width=2)
        assert pages == new


def test_threads_do_not_meet() -> None:
    pairs = [weights(1_000_000, width=width, density=0.01, seed=seed) for width in (2, 4) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        payloads = list(pool.map(lambda pair: encode(*pair, width=2) or b"", pairs))
        outs = list(pool.map(applied, payloads, [base for _, base in pairs]))
    assert outs == [new for new, _ in pairs]


def test_a_hundredth_of_changes_costs_less_than_a_hundredth_of_the_bytes() -> None:
    new, base = weights(2**22, width=2, density=0.01)
    payload = encode(new, base, width=2)
    assert payload
    assert len(payload) < 0.01 * len(new)


def test_nothing_is_encoded_that_is_dense_or_too_short() -> None:
    assert encode(os.urandom(10_000), os.urandom(10_000), width=2) is None
    new, base = weights(2**20, width=2, density=0.25)
    assert encode(new, base, width=2) is None
    assert encode(b"\x01" + bytes(19), bytes(20), width=2) is None


@WIDTHS
def test_a_payload_that_is_cut_anywhere_is_refused(width: int) -> None:
    good, base = forgery(width)
    payload = good.bytes()
    for length in range(1, len(payload)):
        with pytest.raises(DeltaError):
            applied(payload[:length], base)
    with pytest.raises(DeltaError, match="after its planes"):
        applied(payload + b"\0", base)


@WIDTHS
def test_a_frame_that_is_cut_or_followed_by_more_is_refused(width: int) -> None:
    good, base = forgery(width)
    for index in range(NUM_PLANES[width]):
        frame = good.frames[index]
        for wrong in (frame[:-1], frame[: len(frame) // 2], b"", frame + b"\0", frame + frame):
            with pytest.raises(DeltaError, match="a plane"):
                applied(good.with_frame(index, wrong).bytes(), base)


@WIDTHS
def test_a_flipped_bit_is_refused_or_changes_at_most_the_output(width: int) -> None:
    good, base = forgery(width)
    payload = bytearray(good.bytes())
    refused = 0
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        try:
            assert len(applied(bytes(payload), base)) == len(base)
        except DeltaError:
            refused += 1
        payload[bit // 8] ^= 1 << bit % 8
    assert refused > 8 * HEADER.size - 3 * 32


@settings(deadline=None, max_examples=examples(300))
@given(st.data(), st.sampled_from([2, 4]))
def test_planes_of_any_content_write_nowhere_else(data: st.DataObject, width: int) -> None:
    """The header is right, the frames are right, what they hold is anything."""
    good, base = forgery(width)
    changed = data.draw(st.integers(0, 60))
    lengths = st.integers(0, 200) | st.integers(0, 3000) | st.integers(0, 2**32 - 1)
    gaps = np.array(data.draw(st.lists(lengths, min_size=changed, max_size=changed)), "<u4")
    sizes = (-(-changed // 8), *[changed] * width)
    steps = [data.draw(st.binary(min_size=size, max_size=size)) for size in sizes]
    planes = (*(plane.tobytes() for plane in gaps.view(np.uint8).reshape(-1, 4).T), *steps)
    payload = replace(good, changed=changed, frames=tuple(map(zstandard.compress, planes))).bytes()
    if int(gaps.sum(dtype=np.int64)) + changed <= len(base) // width:
        assert len(applied(payload, base)) == len(base)
    else:
        with pytest.raises(DeltaError, match="it changes element"):
            applied(payload, base)


def test_a_lie_in_the_header_is_named() -> None:
    good, base = forgery()
    lies = {
        "format 1": replace(good, form=1),
        "elements of 3 bytes": replace(good, width=3),
        "the base has 40001": replace(good, size=good.size + 2),
        "a plane has": replace(good, changed=good.changed + 1),
        "it changes element": good.with_plane(3, b"\xff" * good.changed),
    }
    for message, lie in lies.items():
        with pytest.raises(DeltaError, match=message):
            applied(lie.bytes(), base)


@pytest.mark.parametrize("changed", [4001, 2**32 - 1])
def test_more_changes_than_are_ever_encoded_are_refused(changed: int) -> None:
    good, base = forgery()
    with pytest.raises(DeltaError, match="changes"):
        applied(replace(good, changed=changed).bytes(), base)


@pytest.mark.parametrize("claimed", [True, False])
def test_a_small_frame_that_inflates_to_gigabytes_takes_no_memory(claimed: bool) -> None:
    good, base = forgery()
    compressor = zstandard.ZstdCompressor(write_content_size=claimed).compressobj(size=2**28 if claimed else -1)
    bomb = b"".join(compressor.compress(bytes(2**20)) for _ in range(2**8)) + compressor.flush()
    for index in range(NUM_PLANES[2]):
        payload = good.with_frame(index, bomb).bytes()
        tracemalloc.start()
        try:
            with pytest.raises(DeltaError, match="a plane has"):
                apply(payload, memoryview(bytearray(base)), width=2)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(base)
        finally:
            tracemalloc.stop()


@settings(deadline=None, max_examples=examples(500))
@given(st.binary(min_size=1, max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(DeltaError):
        applied(noise, bytes(1000))
