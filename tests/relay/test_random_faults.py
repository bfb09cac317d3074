"""A tree under seeded random faults: whatever dies, hangs, lies or fills up, it serves what was published."""

import asyncio
import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from laminar_py.relay.messages import Announce, Attach, Failed, Fetch, Lost, VersionComplete, Want
from laminar_py.relay.stored_version import StoredVersion
from laminar_py.relay.tree import Topology
from tests.relay.faults import SMALL, Fault, Fleet, Weights, fleet, small_disk
from tests.relay.tree import (
    CHUNK,
    ByHand,
    Events,
    HandParent,
    Learner,
    below_hand,
    binary,
    chain,
    make_node,
    running,
    write_version,
)

JOINERS = 2


@dataclass(frozen=True)
class Voyage:
    """What a tree goes through, a fault in each `per_fault` publishes and over the last one too."""

    tree: Topology
    publishes: int
    per_fault: int
    scale: int  # of the weights
    disk_bytes: int  # of the node that has a file system of its own


SHORT_CHUNKS = Voyage(binary(5), publishes=200, per_fault=10, scale=1, disk_bytes=4 * 2**20)
# 2,000 chunks, more than may wait for a connection, through seven hops
MANY_CHUNKS = Voyage(chain(8), publishes=26, per_fault=2, scale=80, disk_bytes=64 * 2**20)
# for every day: each kind of fault once, and half of them with many chunks
QUICK_SHORT_CHUNKS = replace(SHORT_CHUNKS, publishes=48, per_fault=4)
QUICK_MANY_CHUNKS = replace(MANY_CHUNKS, tree=chain(5), publishes=12)


def faults(rng: random.Random, number: int, *, mounted: bool) -> list[Fault]:
    """So many; each kind before any comes again, and no more nodes than two that join."""
    kinds = [kind for kind in Fault if kind is not Fault.JOIN and (mounted or kind is not Fault.FULL)]
    chosen = kinds + [Fault.JOIN] * JOINERS
    chosen += rng.choices(kinds, k=max(0, number - len(chosen)))
    rng.shuffle(chosen)
    return chosen[:number]


async def publish_all(
    ships: Fleet, learner: Learner, rng: random.Random, voyage: Voyage, plan: list[Fault]
) -> None:
    weights = Weights(rng, scale=voyage.scale)
    fault: asyncio.Task[None] | None = None
    for version in range(1, voyage.publishes + 1):
        if version % voyage.per_fault == 0:
            if fault is not None:
                await fault
            fault = asyncio.create_task(ships.inflict(plan.pop()))
        weights.step()
        known = ships.record.announce(version, weights.tensors)
        learner.publisher.publish(version, list(weights.tensors.items()))
        known.set_result(await asyncio.to_thread(learner.publisher.completed, version))
        ships.newest = version
        await ships.keep()
        await ships.rest(rng.choice([0.0, 0.05, 0.3]))
    if fault is not None:
        await fault


async def survive(folder: Path, voyage: Voyage, seed: int) -> None:
    rng = random.Random(seed)
    with small_disk(folder / SMALL, voyage.disk_bytes) as mounted:
        if not mounted:
            warnings.warn(f"without {Fault.FULL.value}: mounting needs root on Linux", stacklevel=1)
        async with fleet(folder, rng, voyage.tree) as ships:
            async with Learner(folder) as learner:
                plan = faults(rng, voyage.publishes // voyage.per_fault, mounted=mounted)
                await publish_all(ships, learner, rng, voyage, plan)
                await ships.choose_tree("stuck", ships.behind)
                await ships.choose_tree("left behind", ships.litter)
            logs = "".join(member.log.read_text() for member in ships.members)
            pids = [member.process.pid for member in ships.members]
            assert not [child for pid in pids for child in psutil.Process(pid).children()]
        assert not any(member.alive for member in ships.members)
    assert "wire_bytes=" in logs


SEEDS = range(1, 12)


def voyages(quick: Voyage, whole: Voyage) -> list[object]:
    return [(quick, 1), *(pytest.param(whole, seed, marks=pytest.mark.slow) for seed in SEEDS)]


@pytest.mark.parametrize(("voyage", "seed"), voyages(QUICK_SHORT_CHUNKS, SHORT_CHUNKS))
async def test_no_fault_makes_a_tree_serve_other_bytes_or_stand_still(
    tmp_path: Path, voyage: Voyage, seed: int
) -> None:
    await survive(tmp_path, voyage, seed)


@pytest.mark.parametrize(("voyage", "seed"), voyages(QUICK_MANY_CHUNKS, MANY_CHUNKS))
async def test_nor_a_long_chain_with_thousands_of_chunks(tmp_path: Path, voyage: Voyage, seed: int) -> None:
    await survive(tmp_path, voyage, seed)


async def give_only(parent: HandParent, version: StoredVersion) -> None:
    """A parent that has this version, and says so of any other that it is asked for."""
    while True:
        match await parent.receive(object):
            case Attach():
                parent.send(Announce(version.manifest))
            case Want(number) if number != version.manifest.version:
                parent.send(Lost(number))
            case Fetch(version=version.manifest.version, file=file, first_chunk=first, credits=count):
                for index in range(first, min(first + count, version.manifest.num_chunks(file))):
                    parent.send_chunk(version, index, file)


async def test_a_version_that_overtook_another_and_is_gone_above_is_let_go(tmp_path: Path) -> None:
    """The parent goes on to 3 before the node has 2, which overtook 1."""
    versions = {number: write_version(tmp_path / "origin", number, 3 * CHUNK) for number in (1, 2, 3)}
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
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
