"""A tree under seeded random faults: whatever dies, hangs, lies or fills up, it serves what was published."""

import asyncio
import random
import warnings
from pathlib import Path

import psutil
import pytest

from laminar_py.relay.messages import Announce, Attach, Failed, Fetch, Lost, VersionComplete, Want
from laminar_py.relay.store import StoredVersion
from tests.relay.faults import SMALL, Fault, Fleet, Weights, fleet, small_disk
from tests.relay.tree import CHUNK, ByHand, Events, HandParent, Learner, make_node, running, write_version

PUBLISHES, PER_FAULT = 200, 10
JOINERS = 2


def faults(rng: random.Random, *, mounted: bool) -> list[Fault]:
    """One for each tenth publish; each kind at least once, and no more nodes than a tree of seven has."""
    kinds = [kind for kind in Fault if kind is not Fault.JOIN and (mounted or kind is not Fault.FULL)]
    chosen = kinds + [Fault.JOIN] * JOINERS
    chosen += rng.choices(kinds, k=PUBLISHES // PER_FAULT - 1 - len(chosen))
    rng.shuffle(chosen)
    return chosen


async def publish_all(ships: Fleet, learner: Learner, rng: random.Random, plan: list[Fault]) -> None:
    """The last ten are published in peace."""
    weights = Weights(rng)
    fault: asyncio.Task[None] | None = None
    for version in range(1, PUBLISHES + 1):
        if version % PER_FAULT == 0:
            if fault is not None:
                await fault
            fault = asyncio.create_task(ships.inflict(plan.pop())) if plan else None
        weights.step()
        known = ships.record.announce(version, weights.tensors)
        learner.publisher.publish(version, list(weights.tensors.items()))
        known.set_result(await asyncio.to_thread(learner.publisher.sealed, version))
        ships.newest = version
        await ships.keep()
        await ships.rest(rng.choice([0.0, 0.05, 0.3]))


async def survive(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    with small_disk(folder / SMALL) as mounted:
        if not mounted:
            warnings.warn(f"without {Fault.FULL.value}: mounting needs root on Linux", stacklevel=1)
        async with fleet(folder, rng) as ships:
            async with Learner(folder, ships.members[0].endpoint) as learner:
                await publish_all(ships, learner, rng, faults(rng, mounted=mounted))
                await ships.settle("stuck", ships.behind)
                await ships.settle("left behind", ships.litter)
            logs = "".join(member.log.read_text() for member in ships.members)
            pids = [member.process.pid for member in ships.members]
            assert not [child for pid in pids for child in psutil.Process(pid).children()]
        assert not any(member.alive for member in ships.members)
    assert "wire_bytes=" in logs


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
async def test_no_fault_makes_a_tree_serve_other_bytes_or_stand_still(tmp_path: Path, seed: int) -> None:
    await survive(tmp_path, seed)


async def give_only(parent: HandParent, version: StoredVersion) -> None:
    """A parent that has this version, and says so of any other that it is asked for."""
    while True:
        match await parent.receive(object):
            case Attach():
                parent.send(Announce(version.manifest))
            case Want(number) if number != version.manifest.version:
                parent.send(Lost(number))
            case Fetch(version.manifest.version, file, first, count):
                for index in range(first, min(first + count, version.manifest.num_chunks(file))):
                    parent.send_chunk(version, index, file)


async def test_a_version_that_overtook_another_and_is_gone_above_is_let_go(tmp_path: Path) -> None:
    """The parent goes on to 3 before the node has 2, which overtook 1."""
    versions = {number: write_version(tmp_path / "origin", number, 3 * CHUNK) for number in (1, 2, 3)}
    async with ByHand() as hand:
        parent = hand.parent()
        async with running(make_node(tmp_path, "relay-1", parent.endpoint, emit=(events := Events()))):
            await parent.receive(Attach)
            for version in versions.values():
                parent.send(Announce(version.manifest))
            giving = asyncio.create_task(give_only(parent, versions[3]))
            await events.first(VersionComplete, version=3)
            giving.cancel()


@pytest.mark.parametrize("begun", [(1, 2), (2,), (3,)], ids=["one overtook another", "one alone", "a later one"])
async def test_a_version_that_died_with_its_parent_does_not_keep_the_node_from_what_the_next_one_has(
    tmp_path: Path, begun: tuple[int, ...]
) -> None:
    versions = {number: write_version(tmp_path / "origin", number, 3 * CHUNK) for number in (1, 2, 3)}
    lasting = write_version(tmp_path / "other", 3 if 3 not in begun else 2, 3 * CHUNK)
    async with ByHand() as hand:
        first, second = hand.parent(), hand.parent()
        node = make_node(tmp_path, "relay-1", first.endpoint, second.endpoint, emit=(events := Events()))
        async with running(node):
            await first.receive(Attach)
            for number in begun:
                first.send(Announce(versions[number].manifest))
            while (await first.receive(Fetch)).version != begun[-1]:
                pass
            first.send(Failed(begun[-1], "no room for the rest"))
            giving = asyncio.create_task(give_only(second, lasting))
            await events.first(VersionComplete, version=lasting.manifest.version)
            giving.cancel()
