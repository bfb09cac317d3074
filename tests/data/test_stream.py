"""The stream of problems: epochs, mixtures, and orders that learn from what they are told."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.data import DataConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.stream import PromptStream, read_levels
from laminar_py.records.scoring import GroupRewards
from tests.data.builders import make_problems, read, written


def make_stream(*counts: int, seed: int = 0, weights: tuple[float, ...] = (), **settings: object) -> PromptStream:
    weights = weights or (1.0,) * len(counts)
    train = [{"path": f"{index}.jsonl", "weight": weight} for index, weight in enumerate(weights)]
    config = DataConfig.model_validate_json(json.dumps({"train": train, **settings}))
    problems = [make_problems(count, prefix=f"s{index}/") for index, count in enumerate(counts)]
    return PromptStream(problems, config, seed=seed)


def ids(stream: PromptStream, places: range) -> list[str]:
    return [stream.prompt(place).id for place in places]


@given(count=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_every_epoch_holds_every_row_once(count: int, seed: int, epoch: int) -> None:
    drawn = [make_stream(count, seed=seed).prompt(epoch * count + place) for place in range(count)]
    assert sorted(int(prompt.id[3:]) for prompt in drawn) == list(range(count))
    assert [prompt.index for prompt in drawn] == list(range(epoch * count, (epoch + 1) * count))


@given(order=st.permutations(range(30)), seed=st.integers(0, 1000))
def test_a_place_holds_the_same_problem_in_whatever_order_it_is_asked_for(order: list[int], seed: int) -> None:
    forward, scattered = make_stream(3, seed=seed), make_stream(3, seed=seed)  # 30 places are 10 epochs
    expected = ids(forward, range(30))
    assert [scattered.prompt(index).id for index in order] == [expected[index] for index in order]


def test_a_problem_is_found_by_its_id_in_whichever_source_it_is() -> None:
    stream = make_stream(2, 3)
    found = {prompt.id: prompt.text for prompt in map(stream.prompt, range(40))}
    assert {id: prompt.text for id in found if (prompt := stream.find(id))} == found
    assert stream.find("s1/3") is None


def test_epochs_and_seeds_differ() -> None:
    drawn = {
        tuple(ids(make_stream(50, seed=seed), range(50 * epoch, 50 * epoch + 50)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(drawn) == 4


@pytest.mark.parametrize("order", ["shuffled", "curriculum", "signal"])
def test_sources_have_the_shares_of_their_weights_under_every_order(order: str) -> None:
    stream = make_stream(7, 400, 50, weights=(3, 1, 1), order=order, level_groups=1)
    for place in range(500):  # some that teach nothing
        prompt = stream.prompt(place)
        stream.record_group(GroupRewards(place, prompt.id, (0.0, 0.0) if prompt.id < "s1/2" else (0.0, 1.0)))
    drawn = ids(stream, range(1000))
    assert [sum(id.startswith(f"s{index}/") for id in drawn) for index in range(3)] == [600, 200, 200]


def test_each_source_of_a_mixture_has_epochs_of_its_own() -> None:
    drawn = ids(make_stream(5, 20, weights=(1, 3)), range(1000))
    of_each = [[id for id in drawn if id.startswith(f"s{index}/")] for index in range(2)]
    assert sorted(of_each[0][:5]) == sorted(set(of_each[0]))
    assert sorted(of_each[1][:20]) == sorted(set(of_each[1]))


def test_a_level_opens_once_the_ones_below_are_solved_and_closes_when_one_is_no_more() -> None:
    stream = make_stream(4, order="curriculum", level_groups=4, opens_at=0.75)
    assert set(ids(stream, range(40))) == {"s0/0"}
    for place in range(4):
        stream.record_group(GroupRewards(place, "s0/0", (1.0, 1.0, 1.0, 0.0)))
    assert set(ids(stream, range(40))) == {"s0/0", "s0/1"}
    assert stream.figures.solved == {"0": 0.75}
    assert stream.figures.open_levels == 2
    stream.record_group(GroupRewards(4, "s0/0", (0.0,)))
    assert set(ids(stream, range(40))) == {"s0/0"}


def test_a_level_may_be_a_text_and_its_problems_are_shuffled_together_with_those_below() -> None:
    config = DataConfig.model_validate_json(
        '{"train": "a", "order": "curriculum", "level": "hard", "level_groups": 1}'
    )
    problems = make_problems(10, fields='{"hard": "LROW"}')
    stream = PromptStream([problems], config, seed=0)
    assert set(ids(stream, range(10))) == {"0"}
    stream.record_group(GroupRewards(0, "0", (1.0,)))
    assert sorted(ids(stream, range(2))) == ["0", "1"]


def test_levels_that_are_numbers_in_texts_are_sorted_as_numbers() -> None:
    levels = read_levels(make_problems(12, fields='{"level": "ROW"}'), "level")
    assert levels.names == [str(row) for row in range(12)]
    assert levels.ranks.tolist() == list(range(12))
    assert levels.num_rows == list(range(13))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ('{"x": 1}', "'level' holds no number or text"),
        ('{"level": [1]}', "'level' holds no number or text"),
        ('{"level": "one"}', "'level' holds another type of value than the problems before"),
    ],
)
def test_a_problem_without_a_level_is_refused(tmp_path: Path, fields: str, fault: str) -> None:
    config = DataConfig.model_validate_json('{"train": "a.jsonl", "order": "curriculum"}')
    problems = read(written(tmp_path / "a.jsonl", '{"prompt": "a", "level": 1}', '{"prompt": "b", ' + fields[1:]))
    with pytest.raises(
        ConfigError, match=rf"^data\.train=.*a\.jsonl:2: {fault}.*; write a level, name its field in"
    ):
        PromptStream([problems], config, seed=0)


def test_a_problem_comes_rarely_by_the_formula_after_visits_that_taught_nothing() -> None:
    stream = make_stream(100, order="signal", rest_floor=0.25)
    for place in range(4):  # the first four problems: 0 to 3 silent visits in a row
        for visit in range(place):
            stream.record_group(GroupRewards(10 * visit, f"s0/{place}", (1.0, 1.0)))
    drawn = ids(stream, range(100 * 100))
    counts = [drawn.count(f"s0/{row}") / 100 for row in range(5)]
    assert counts == pytest.approx([1.0, 0.5, 0.25, 0.25, 1.0], abs=0.2)
    assert stream.figures.resting == 3


def test_a_visit_with_a_signal_ends_the_rest_of_a_problem() -> None:
    stream = make_stream(9, order="signal")
    stream.record_group(GroupRewards(0, "s0/3", (0.0, 0.0)))
    stream.record_group(GroupRewards(20, "s0/3", (0.0, 1.0)))
    stream.record_group(GroupRewards(10, "s0/3", (0.0, 0.0)))  # closed late
    assert stream.figures.resting == 0


@pytest.mark.parametrize("order", ["curriculum", "signal"])
@given(visits=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0])), max_size=60), data=st.data())
def test_the_order_in_which_groups_closed_does_not_matter(order, visits, data) -> None:
    told = [GroupRewards(place, f"s0/{row}", (1.0, reward)) for place, (row, reward) in enumerate(visits)]
    one, other = (make_stream(6, order=order, level_groups=3) for _ in range(2))
    for group in told:
        one.record_group(group)
    for group in data.draw(st.permutations(told)):
        other.record_group(group)
    assert ids(one, range(100, 160)) == ids(other, range(100, 160))
    assert one.figures == other.figures
