"""Loads by changed positions in a replica with the real embedded engine: policies, refusals, checks, a crash."""

import asyncio
import logging

import pytest
import torch
from safetensors.torch import load_file

from laminar_py.config.rollout import OnNewWeights
from laminar_py.engines.local.weights import FileView
from laminar_py.records.engine import EngineLostError, RefusedError
from laminar_py.records.weights import AT, TO
from tests.engines.changes import nudged, read_version, save_changes, write_changes
from tests.learner.builders import make_model_folder
from tests.rollout.test_replica import assignment, serving

POLICIES = list(OnNewWeights)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Eight versions."""
    root = tmp_path_factory.mktemp("versions")
    folders = [make_model_folder(root / "v0", seed=0)]
    for version in range(1, 8):
        folders.append(nudged(folders[-1], root / f"v{version}", seed=version))
    return folders


@pytest.fixture(scope="module")
def changes(versions, tmp_path_factory):
    """(base, version) -> the files of changes between versions in turn."""
    root = tmp_path_factory.mktemp("changes")
    pairs = [(version - 1, version) for version in range(1, 8)]
    return {
        (base, version): [
            write_changes(versions[base], versions[version], root / f"v{version}", base=base, version=version)
        ]
        for base, version in pairs
    }


async def load(story, weights, version):
    """Publish a version and return the report of its load."""
    await weights.publish(version)
    found = []

    async def look(take=story.take):
        found.extend((await take()).loads)

    async with asyncio.timeout(60):
        while not any(event.version == version for event in found):
            await look()
    return found[-1]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_replica_changes_its_weights_under_each_policy(policy, versions, changes):
    async with serving(versions, policy=policy, verify_every=100) as (story, weights):
        weights.changes = changes
        await story.until(lambda s: s.admissible > 0)
        running = policy is not OnNewWeights.DRAIN
        if running:
            story.replica.start_assignments([assignment("a", length=3000)])
            await story.until(lambda s: len(s.ids["a"]) > 0)
        assert (await load(story, weights, 1)).base == 0
        assert (await load(story, weights, 2)).base == 1
        served = await story.replica._engine.checksum()
        await story.replica.abort(["a"])
        if running:
            await story.until(lambda s: "a" in s.ended)
            assert {0, 1} <= story.versions("a")
        await story.replica._engine.load_weights(versions[2], 2)
        assert await story.replica._engine.checksum() == served


async def test_a_version_that_the_host_lacks_as_changes_is_loaded_whole(versions, changes):
    async with serving(versions, verify_every=100) as (story, weights):
        await story.until(lambda s: s.loads == [0])
        assert (await load(story, weights, 1)).base is None
        weights.changes = changes
        assert (await load(story, weights, 2)).base == 1
        assert weights.pulls == [(0, -1), (1, 0), (2, 1)]


@pytest.mark.parametrize("policy", [OnNewWeights.DRAIN, OnNewWeights.IN_PLACE])
async def test_refused_changes_are_followed_by_the_whole_version_and_a_hash(
    policy, versions, changes, tmp_path, caplog
):
    name = "model.norm.weight"
    bad = {name + AT: torch.tensor([0]), name + TO: torch.tensor([float("nan")])}
    async with serving(versions, policy=policy, verify_every=100) as (story, weights):
        weights.changes = changes | {(0, 1): [save_changes(bad, tmp_path / "bad", base=0, version=1)]}
        await story.until(lambda s: s.loads == [0] and s.admissible > 0)
        if policy is OnNewWeights.IN_PLACE:
            story.replica.start_assignments([assignment("a", length=3000)])
            await story.until(lambda s: len(s.ids["a"]) > 0)
        with caplog.at_level(logging.WARNING):
            event = await load(story, weights, 1)
        assert (event.base, event.stale) == (None, ())
        assert event.checksum == (await story.replica._engine.checksum()).total
        assert "loads the whole version 1: changes=" in caplog.text
        assert "not finite" in caplog.text
        assert weights.pulls[1:] == [(1, 0), (1, -1)]
        assert (await load(story, weights, 2)).base == 1


async def test_changes_that_an_engine_refuses_after_their_check_are_followed_by_the_whole_version(
    versions, changes
):
    async with serving(versions, policy=OnNewWeights.IN_PLACE, verify_every=100) as (story, weights):
        weights.changes = changes
        await story.until(lambda s: s.loads == [0] and s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=3000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)

        async def refuse(changes):
            raise RefusedError(f"version {changes.version}: the parameters have moved")

        story.replica._engine.load_changes = refuse
        event = await load(story, weights, 1)
        assert (event.base, event.stale) == (None, ())
        assert event.checksum == (await story.replica._engine.checksum()).total
        assert weights.pulls[1:] == [(1, 0), (1, -1)]


async def test_a_trajectory_that_arrives_during_the_check_keeps_the_version(versions, changes):
    async with serving(versions, policy=OnNewWeights.IN_PLACE, verify_every=100) as (story, weights):
        weights.changes = changes
        await story.until(lambda s: s.loads == [0] and s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=3000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        engine, asked = story.replica._engine, []

        async def check(files, version):
            asked.append(version)
            return await type(engine).check_changes(engine, files, version)

        engine.check_changes = check
        story.replica._may_swap = lambda: not asked
        await weights.publish(1)
        await story.until(lambda s: asked)
        await story.until(lambda s: "a" in s.ended)
        assert story.versions("a") == {0}


async def test_a_refusal_whose_folder_is_gone_leaves_the_old_version_to_the_running(versions, tmp_path):
    policy = OnNewWeights.IN_PLACE
    async with serving(versions, policy=policy, verify_every=100) as (story, weights):
        await story.until(lambda s: s.loads == [0] and s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=3000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        weights.changes = {(0, 1): [tmp_path / "missing"]}
        pull = weights.pull

        async def pull_once(version=None, *, base=-1):
            pulled = await pull(version, base=base)
            weights.lost.add(1)
            return pulled

        weights.pull = pull_once
        await weights.publish(1)
        await story.until(lambda s: weights.lost)
        await weights.publish(2)
        await story.until(lambda s: 2 in s.loads)
        await story.until(lambda s: "a" in s.ended)
        assert story.loads == [0, 2]
        assert story.versions("a") == {0, 2}


async def test_every_nth_version_by_changes_is_compared_with_its_whole_load(versions, changes):
    async with serving(versions, verify_every=3) as (story, weights):
        weights.changes = changes
        await story.until(lambda s: s.loads == [0])
        events = [await load(story, weights, version) for version in range(1, 8)]
    assert [event.base for event in events] == list(range(7))
    assert [event.version for event in events if event.checksum] == [3, 6]
    assert not [event for event in events if event.stale]
    assert [version for version, base in weights.pulls if base < 0] == [0, 3, 6]


async def test_where_every_version_is_verified_each_is_loaded_whole(versions, changes):
    async with serving(versions, verify_every=1) as (story, weights):
        weights.changes = changes
        await story.until(lambda s: s.loads == [0])
        event = await load(story, weights, 1)
    assert event.base is None
    assert event.checksum
    assert weights.pulls == [(0, -1), (1, -1)]


async def test_a_change_that_never_lands_is_named_with_its_tensor_and_mended(versions, changes, tmp_path):
    name = "model.layers.0.self_attn.k_proj.weight"
    number, tensor = 7, read_version(versions[3])[name].flatten()
    wrong = {name + AT: torch.tensor([number]), name + TO: tensor[[number]] + 1}
    (right,) = changes[(2, 3)]
    first = save_changes(wrong, tmp_path / "first", base=2, version=99)
    async with serving(versions, verify_every=3) as (story, weights):
        # the file of version 3 as it is, after one that changes a number of its own
        weights.changes = changes | {(2, 3): [first, relabelled(right, tmp_path / "second", base=99, version=3)]}
        await story.until(lambda s: s.loads == [0])
        events = [await load(story, weights, version) for version in range(1, 4)]
        served = await story.replica._engine.checksum()
        await story.replica._engine.load_weights(versions[3], 3)
        assert await story.replica._engine.checksum() == served, "the whole load has mended it"
    assert [event.stale for event in events] == [(), (), (name,)]


def give_up(weights, version):
    """Let the relay give a version up after its changes were pulled; `RelayError` is such an error."""
    pull = weights.pull

    async def pull_changes(wanted=None, *, base=-1):
        if wanted == version:
            raise RuntimeError(f"version {version}: chunk 3 came damaged 3 times")
        return await pull(wanted, base=base)

    weights.pull = pull_changes


async def test_a_version_given_up_before_its_check_is_served_and_the_next_is_checked(versions, changes):
    async with serving(versions, policy=OnNewWeights.IN_PLACE, verify_every=2) as (story, weights):
        weights.changes = changes
        await story.until(lambda s: s.loads == [0] and s.admissible > 0)
        give_up(weights, 2)
        events = [await load(story, weights, version) for version in (1, 2, 3)]
    assert [event.base for event in events] == [0, 1, 2]
    assert [event.version for event in events if event.checksum] == [3]


@pytest.mark.parametrize("policy", [OnNewWeights.DRAIN, OnNewWeights.IN_PLACE])
async def test_a_refused_version_given_up_meanwhile_leaves_the_old_one(
    policy, versions, changes, tmp_path, caplog
):
    async with serving(versions, policy=policy, verify_every=100) as (story, weights):
        weights.changes = changes | {(0, 1): [tmp_path / "missing"]}
        await story.until(lambda s: s.loads == [0] and s.admissible > 0)
        give_up(weights, 1)
        if policy is OnNewWeights.IN_PLACE:
            story.replica.start_assignments([assignment("a", length=3000)])
            await story.until(lambda s: len(s.ids["a"]) > 0)
        await weights.publish(1)
        await story.until(lambda s: "keeps version 0: version 1: chunk 3" in caplog.text)
        assert (await load(story, weights, 2)).base is None


@pytest.mark.parametrize("newest", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
async def test_a_host_without_a_newer_version_leaves_the_present_one_in_use(
    policy, newest, versions, changes, caplog
):
    async with serving(versions, policy=policy, verify_every=100) as (story, weights):
        weights.changes = changes
        await story.until(lambda s: s.loads == [0] and s.admissible > 0)
        assert (await load(story, weights, 1)).base == 0
        if policy is not OnNewWeights.DRAIN:
            story.replica.start_assignments([assignment("a", length=3000)])
            await story.until(lambda s: len(s.ids["a"]) > 0)
        pull = weights.pull

        async def pull_older(version=None, *, base=-1):
            weights.pull = pull
            return await pull(newest)

        weights.pull = pull_older
        await weights.publish(2)
        await story.until(lambda s: f"keeps version 1: the newest version of this host is {newest}" in caplog.text)
        assert (await load(story, weights, 3)).base is None
        assert 1 not in story.loads[story.loads.index(1) + 1 :]


async def test_an_error_of_the_engine_at_the_whole_load_is_not_taken_for_one_of_the_relay(
    versions, changes, tmp_path
):
    async with serving(versions, verify_every=100) as (story, weights):
        weights.changes = changes | {(0, 1): [tmp_path / "missing"]}
        await story.until(lambda s: s.loads == [0] and s.admissible > 0)

        async def fail(path, version):
            raise RuntimeError("of the engine")

        story.replica._engine.load_weights = fail
        await weights.publish(1)
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(20.0):
                await story.task
        assert raised.group_contains(RuntimeError, match="of the engine")


def relabelled(file, into, *, base, version):
    return save_changes(load_file(file), into, base=base, version=version)


async def test_an_engine_that_dies_amid_changes_comes_back_by_the_whole_version(versions, changes, monkeypatch):
    async with serving(versions, verify_every=100) as (story, weights):
        weights.changes = changes
        await story.until(lambda s: s.loads == [0])
        put, done = FileView.put, []

        def put_three(view, at, to):
            if len(done) == 3:
                raise MemoryError("amid the changes")  # ends the engine's thread
            done.append(at)
            put(view, at, to)

        monkeypatch.setattr(FileView, "put", put_three)
        await weights.publish(1)
        with pytest.raises(EngineLostError, match="amid the changes"):
            await story.until(lambda s: False)
        monkeypatch.undo()
    async with serving(versions, verify_every=100) as (story, again):
        again.changes, again.newest = changes, 1
        await story.until(lambda s: s.loads == [1])
        checksum = await story.replica._engine.checksum()
        await story.replica._engine.load_weights(versions[1], 1)
        assert await story.replica._engine.checksum() == checksum
        assert again.pulls == [(1, -1)]
