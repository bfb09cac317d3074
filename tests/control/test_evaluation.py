"""Passes over held-out problems: their names, their sampling, and how they go on."""

import pytest
from msgspec import structs

from laminar_py.control.evaluation import EvaluationLostError
from laminar_py.ledger.recovery import Recovered
from laminar_py.records.engine import SamplingParams
from laminar_py.records.evaluations import EvalAnswer, set_figures
from laminar_py.records.events import Dropped
from laminar_py.records.scoring import Score, TermValue
from laminar_py.records.trajectory import FinishReason, Kind, Status
from tests.builders import make_prompt
from tests.control.fleet import Fleet, ages_of
from tests.control.test_restore import left

SAMPLED = SamplingParams(max_new_tokens=99, temperature=0.6, top_p=0.9)


def make_fleet():
    fleet = Fleet(replicas=1, sampling_by_set={"aime": SAMPLED})
    fleet.scheduler.pause()
    return fleet


def ask(fleet, *, version=0, **settings):
    prompts = [make_prompt(0), make_prompt(1)]
    return fleet.scheduler.evaluations.request(prompts, version, set_name="aime", samples=2, **settings)


async def answer_all(fleet, rewards):
    """Finish and score everything; rewards and words by trajectory."""
    await fleet.finish_all(0)
    for trajectory in list(fleet.unscored):
        reward, said = rewards[trajectory.id]
        terms = [TermValue(name="math", value=reward, answer=said)]
        await fleet.scheduler.incoming.on_score(Score(trajectory_id=trajectory.id, value=reward, terms=terms))


async def test_samples_of_a_set_have_its_sampling_and_seeds_of_their_own():
    fleet = make_fleet()
    asked = ask(fleet)
    await fleet.report(0)
    items = fleet.running[0]
    assert list(items) == ["e0-aime.0.0", "e0-aime.0.1", "e0-aime.1.0", "e0-aime.1.1"]
    sampling = [one.sampling for one in items.values()]
    assert {(one.temperature, one.top_p, one.max_new_tokens) for one in sampling} == {(0.6, 0.9, 99)}
    assert len({one.seed for one in sampling}) == 4
    await answer_all(fleet, {name: (float(name.endswith("1")), name[-1]) for name in items})
    figures = set_figures((await asked).answers.values(), samples=2, verdicts=["math"])
    assert (figures.mean.value, figures.pass_at[2].value, figures.majority.value) == (0.5, 1.0, 0.5)


async def test_the_seed_of_an_answer_depends_on_its_name_alone():
    first, second = make_fleet(), make_fleet()
    second.scheduler.evaluations.request([], 0)  # another pass before it
    seeds = []
    for fleet in (first, second):
        ask(fleet, index=0)
        await fleet.report(0)
        seeds.append({name: one.sampling.seed for name, one in fleet.running[0].items()})
    assert seeds[0] == seeds[1]


async def test_a_pass_that_is_asked_for_again_keeps_answers_and_goes_on_with_what_was_under_way():
    fleet = make_fleet()
    known = EvalAnswer(problem=0, sample=0, reward=1.0, length=3)
    fleet.scheduler.await_restore()
    asked = ask(fleet, version=4, answers={"e0-aime.0.0": known})
    fleet.versions[0] = 4
    await fleet.report(0)
    assert not fleet.running[0], "nothing is handed out before it is known what is under way"
    assert fleet.scheduler.dispatcher.for_starting(0) == []
    running = structs.replace(left("e0.1", Status.RUNNING, kind=Kind.EVAL), id="e0-aime.0.1", group_id="e0-aime")
    finished = structs.replace(left("e0.0", Status.FINISHED, kind=Kind.EVAL), id="e0-aime.1.0", group_id="e0-aime")
    await fleet.scheduler.restore(recovered(running, finished))
    assert [trajectory.id for trajectory in fleet.unscored] == ["e0-aime.1.0"]
    await fleet.report(0)
    items = fleet.running[0]
    assert {name: one.length for name, one in items.items()} == {"e0-aime.0.1": 3, "e0-aime.1.1": 0}
    await answer_all(fleet, dict.fromkeys([*items, "e0-aime.1.0"], (0.0, "")))
    answers = (await asked).answers
    assert {name: answer.reward for name, answer in answers.items()} == {
        "e0-aime.0.0": 1.0,
        "e0-aime.0.1": 0.0,
        "e0-aime.1.0": 0.0,
        "e0-aime.1.1": 0.0,
    }
    assert not fleet.scheduler.state.live


async def test_an_answer_that_the_cap_of_its_set_cuts_counts_as_cut():
    fleet = make_fleet()
    asked = ask(fleet)
    await fleet.report(0)
    names = list(fleet.running[0])
    await fleet.finish(0, names[0], reason=FinishReason.LENGTH)
    assert [event.value for event in fleet.log.events if type(event).__name__ == "Cut"] == [99]
    await answer_all(fleet, dict.fromkeys(names, (0.0, "")))
    assert set_figures((await asked).answers.values(), samples=2).truncated.value == 0.25


def recovered(*live):
    """State that a dead controller left."""
    return Recovered(
        incarnation=2,
        checkpoint=None,
        events=(),
        live=live,
        next_prompt=0,
        next_evaluation=1,
        next_sample={},
        ages=ages_of(range(5)),
    )


async def test_what_a_lost_version_leaves_of_an_evaluation_is_gone_on_with_where_versions_return():
    fleet = Fleet(replicas=1, sampling_by_set={"aime": SAMPLED}, versions_return=True)
    fleet.scheduler.pause()
    asked = ask(fleet)
    await fleet.report(0)
    await fleet.report(0, lost=tuple(fleet.running[0]))
    with pytest.raises(EvaluationLostError):
        await asked
    assert not [event for event in fleet.log.events if isinstance(event, Dropped)], "whose ids would be used up"
    live = fleet.scheduler.state.live.values()
    assert {trajectory.status for trajectory in live} <= {Status.INTERRUPTED, Status.RUNNING}


async def busy_fleet(*, one_version):
    """Eight replicas, all full of training, the last three with weights that are older."""
    fleet = Fleet(replicas=8, batch_per_replica=8, capacity=64, one_version=one_version)
    fleet.scheduler.published(1)
    for index in range(8):
        fleet.versions[index] = int(index < 5)
        await fleet.report(index, admissible=8)
    assert all(fleet.running.values())
    return fleet


def members(fleet, name):
    """Ids of members of a pass by replica."""
    found = {index: [id for id in running if id.startswith(name)] for index, running in fleet.running.items()}
    return {index: ids for index, ids in found.items() if ids}


@pytest.mark.parametrize("one_version", [True, False])
async def test_a_pass_beside_training_has_as_few_replicas_as_hold_it_and_one_version(one_version):
    fleet = await busy_fleet(one_version=one_version)
    asked = fleet.scheduler.evaluations.request([make_prompt(place) for place in range(20)], samples=1)
    fleet.hand_out()
    ((first, begun),) = members(fleet, "e0").items()
    assert (fleet.versions[first], len(begun)) == (1, 8), "a batch, where the weights are the newest"
    await fleet.grow(first, begun[0], tokens=2)
    fleet.hand_out()
    while held := members(fleet, "e0"):
        assert len(held) <= 3
        assert {fleet.versions[index] for index in held} == {1}
        assert sum(map(len, held.values())) <= 24
        index, ids = next(iter(held.items()))
        await fleet.finish(index, ids[0], admissible=0)
    await fleet.score_all(lambda index: 1.0)
    assert (await asked).version == 1
    assert len((await asked).answers) == 20


async def test_replicas_keep_their_version_for_a_pass_until_nothing_of_it_waits():
    fleet = await busy_fleet(one_version=True)
    asked = fleet.scheduler.evaluations.request([make_prompt(place) for place in range(20)], samples=1)
    fleet.hand_out()
    ((first, begun),) = members(fleet, "e0").items()
    assert all(fleet.running[first][id].more_to_come for id in begun)
    keeping, told = {first}, {}
    while held := members(fleet, "e0"):
        for index, ids in held.items():
            keeping |= {index for id in ids if fleet.running[index][id].more_to_come}
            for id in ids:  # all of it, before anything more has come
                await fleet.finish(index, id, admissible=0)
        told |= fleet.scheduler.moves.take_called_off()
    assert told == {index: ["e0"] for index in keeping}
    await fleet.score_all(lambda index: 1.0)
    assert len((await asked).answers) == 20


async def test_a_replica_that_keeps_its_version_for_a_pass_is_given_nothing_newer_and_one_that_died_keeps_none():
    fleet = Fleet(replicas=1, batch_per_replica=1)
    fleet.scheduler.pause()
    fleet.scheduler.evaluations.request([make_prompt(0), make_prompt(1)], samples=1)
    await fleet.report(0)
    (id,) = fleet.running[0]
    fleet.scheduler.views.returned(0, id)  # it has ended, and what it said is on its way
    assert fleet.scheduler.router.for_pinned(5) is None
    await fleet.lose_replica(0)
    await fleet.report(0)
    assert not fleet.scheduler.moves.take_called_off()


async def test_a_replica_that_starts_with_a_part_of_a_pass_keeps_its_version_for_the_rest():
    fleet = Fleet(replicas=1, batch_per_replica=1)
    fleet.scheduler.pause()
    fleet.scheduler.evaluations.request([make_prompt(0), make_prompt(1), make_prompt(2)], samples=1)
    await fleet.report(0)
    (id,) = fleet.running[0]
    await fleet.grow(0, id, tokens=2)
    await fleet.lose_replica(0)
    (part,) = fleet.scheduler.dispatcher.for_starting(0)
    assert (part.version, part.more_to_come) == (0, True)


async def test_passes_that_begin_together_do_so_on_replicas_of_their_own():
    fleet = await busy_fleet(one_version=True)
    for _ in range(2):
        fleet.scheduler.evaluations.request([make_prompt(place) for place in range(4)], samples=2)
    fleet.hand_out()
    assert not set(members(fleet, "e0")) & set(members(fleet, "e1"))


@pytest.mark.parametrize("version", [None, 3])
async def test_a_pass_before_rl_uses_every_replica_also_one_that_serves_later(version):
    fleet = Fleet(replicas=2, in_rl=False)
    fleet.scheduler.published(3)
    asked = fleet.scheduler.evaluations.request([make_prompt(place) for place in range(20)], version, samples=1)
    fleet.versions = {0: 3, 1: 3}
    await fleet.report(0)
    assert {index: len(ids) for index, ids in members(fleet, "e0").items()} == {0: 10}
    await fleet.report(1)
    assert {index: len(ids) for index, ids in members(fleet, "e0").items()} == {0: 10, 1: 10}
    for index in (0, 1):
        await fleet.finish_all(index)
    await fleet.score_all(lambda index: 1.0)
    assert (await asked).version == 3


async def test_a_pass_beside_training_goes_to_a_replica_that_is_idle_too():
    fleet = Fleet(replicas=2, batch_per_replica=64, capacity=8)
    fleet.scheduler.published(1)
    fleet.versions = {0: 1, 1: 1}
    await fleet.report(0, admissible=0)
    await fleet.report(1, admissible=0)
    fleet.scheduler.admit()
    fleet.scheduler.evaluations.request([make_prompt(place) for place in range(80)], samples=1)
    fleet.hand_out()
    ((first, begun),) = members(fleet, "e0").items()
    await fleet.grow(first, begun[0], tokens=2)
    fleet.hand_out()
    assert sorted(len(ids) for ids in members(fleet, "e0").values()) == [16, 64]
