"""A wall clock that jumps: durations are of the monotonic clock, so no timeout fires early or late."""

import asyncio
import time
from pathlib import Path

import pytest

from laminar_py.relay.messages import ParentLost, VersionComplete, VersionFailed
from tests.relay.tree import Events, Learner, chain, folder_bytes, growing, running, subscriber

HOUR_S = 3600.0
PATIENT_S = 0.4  # of these nodes, when their parent is away


class JumpyClock:
    """Real time and an error that `jump` changes, also between two readings in one line of code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = time.time
        self.error_s = 0.0
        monkeypatch.setattr(time, "time", self)

    def __call__(self) -> float:
        return self._real() + self.error_s

    async def jump(self) -> None:
        """An hour on, an hour back, and so on, many times in each of a node's timeouts."""
        while True:
            for self.error_s in (HOUR_S, -HOUR_S):
                await asyncio.sleep(PATIENT_S / 20)


async def test_a_broadcast_goes_on_undisturbed_while_the_clock_jumps_by_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    async with (
        growing(tmp_path, chain(3), parent_timeout_s=PATIENT_S, emit=events) as nodes,
        Learner(tmp_path) as learner,
        running(leaf := subscriber(nodes[2], "replica-0")),
    ):
        jumping = asyncio.create_task(JumpyClock(monkeypatch).jump())
        for version in range(1, 5):
            await learner.publish(version, num_bytes=2_000_000)
            await events.first(VersionComplete, node="relay-2", version=version)
            assert (await leaf.pull(version)).version == version
            await asyncio.sleep(
                2 * PATIENT_S if version == 2 else 0
            )  # idle for longer than a parent may be silent
        jumping.cancel()
    assert not [event for event in events.seen if isinstance(event, ParentLost | VersionFailed)]
    times_s = [event.elapsed_s for event in events.seen if isinstance(event, VersionComplete)]
    assert len(times_s) == 3 * 4
    assert 0 <= min(times_s) <= max(times_s) < HOUR_S / 2
    assert folder_bytes(tmp_path / "relay-2" / "v4") == folder_bytes(tmp_path / "relay-0" / "v4")


@pytest.mark.parametrize("error_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
async def test_a_parent_that_is_gone_is_left_after_its_time_though_the_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_s: float
) -> None:
    events, clock = Events(), JumpyClock(monkeypatch)
    async with (
        growing(tmp_path, chain(3), parent_timeout_s=PATIENT_S, emit=events) as nodes,
        Learner(tmp_path) as learner,
    ):
        await learner.publish(1)
        await events.first(VersionComplete, node="relay-2", version=1)
        began = time.monotonic()
        await nodes[1].close()
        clock.error_s = error_s
        await events.first(ParentLost, node="relay-2", old=nodes[1].endpoint, new=nodes[0].endpoint)
        assert time.monotonic() - began > 0.9 * PATIENT_S
        await learner.publish(2)
        await events.first(VersionComplete, node="relay-2", version=2)
