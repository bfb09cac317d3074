"""Link measurement between two hosts: real sockets in one loop, and the arithmetic of its two equations."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.relay import link_speed as link
from laminar_py.relay.link_speed import (
    SIZES,
    MeasurementError,
    larger_size,
    link_speed,
    measure_link,
    send_chunks,
)
from laminar_py.relay.sockets import RelayKeys

KEYS = RelayKeys.generate()
PATIENCE_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def test_a_link_is_measured_over_real_sockets_and_both_ends_end() -> None:
    port = free_port()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as ends:
        ends.create_task(send_chunks("127.0.0.1", port, KEYS))
        speed = await measure_link(f"tcp://127.0.0.1:{port}", KEYS)
    assert speed.bytes_per_s > 0
    assert speed.overhead_s >= 0


async def test_the_receiving_end_may_be_there_first() -> None:
    port = free_port()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as ends:
        speed = ends.create_task(measure_link(f"tcp://127.0.0.1:{port}", KEYS))
        await asyncio.sleep(0)  # it connects, and waits
        ends.create_task(send_chunks("127.0.0.1", port, KEYS))
    assert speed.result().bytes_per_s > 0


async def test_strangers_are_not_measured_and_each_end_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CONTACT_S", 0.5)
    port = free_port()
    stranger = asyncio.create_task(send_chunks("127.0.0.1", port, RelayKeys.generate()))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(MeasurementError, match=f"nothing came from tcp://127.0.0.1:{port}"):
            await measure_link(f"tcp://127.0.0.1:{port}", KEYS)
        with pytest.raises(MeasurementError, match="nobody asked"):
            await stranger


async def test_whatever_the_sockets_raise_is_a_measurement_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(MeasurementError, match="in use"):
        await send_chunks("127.0.0.1", taken.getsockname()[1], KEYS)
    no_keys = RelayKeys("short", "too")
    with pytest.raises(MeasurementError, match="ZMQError"):
        await send_chunks("127.0.0.1", 0, no_keys)
    with pytest.raises(MeasurementError, match="ZMQError"):
        await measure_link("tcp://127.0.0.1:9", no_keys)
    with pytest.raises(MeasurementError, match="ZMQError"):
        await measure_link("no address", KEYS)


@given(st.floats(1e6, 1e11), st.floats(0, 1e-2), st.integers(1, len(SIZES) - 1))
def test_two_sizes_give_bandwidth_and_overhead(bytes_per_s: float, overhead_s: float, place: int) -> None:
    small_s, large_s = (overhead_s + size / bytes_per_s for size in (SIZES[0], SIZES[place]))
    speed = link_speed(small_s, large_s, SIZES[place])
    assert speed.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert speed.overhead_s == pytest.approx(overhead_s, rel=1e-3, abs=1e-6)


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.integers(1, len(SIZES) - 1))
def test_whatever_was_measured_a_link_has_bandwidth_and_no_negative_overhead(
    small_s: float, large_s: float, place: int
) -> None:
    speed = link_speed(small_s, large_s, SIZES[place])
    assert speed.bytes_per_s > 0
    assert speed.overhead_s >= 0


def test_a_slow_link_is_measured_with_smaller_chunks() -> None:
    at = {gbit: SIZES[larger_size(SIZES[0] * 8 / (gbit * 1e9))] for gbit in (0.01, 1.0, 10.0, 400.0)}
    assert at == {0.01: SIZES[1], 1.0: SIZES[2], 10.0: SIZES[3], 400.0: SIZES[3]}
