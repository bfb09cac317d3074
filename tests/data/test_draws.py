"""A stream that skips or repeats prompts is named at once, and a sound one never is (law 13)."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.data import DataConfig
from laminar_py.data.draws import Draws, SizeTest
from laminar_py.data.stream import PromptStream
from laminar_py.ledger.recovery import issued_groups
from laminar_py.ledger.run_folder import LEDGER_NAME
from laminar_py.records.events import Dropped, RolledBack, Undone
from laminar_py.records.scoring import GroupRewards
from laminar_py.records.trajectory import DropReason, Kind
from tests.data.builders import make_problems
from tests.ledger.runs import begin, consume, issue, make_ready, open_ledger


def make(*counts: int, seed: int = 0, weights: tuple[float, ...] = (), **settings: object):
    """A stream of sources, and a check of its draws."""
    weights = weights or (1.0,) * len(counts)
    train = [{"path": f"{index}.jsonl", "weight": weight} for index, weight in enumerate(weights)]
    config = DataConfig.model_validate_json(json.dumps({"train": train, **settings}))
    problems = [make_problems(count, prefix=f"train.{index}/") for index, count in enumerate(counts)]
    stream = PromptStream(problems, config, seed=seed)
    return stream, Draws(problems, config, num_open=stream.num_open)


def first_fault(draws: Draws, ids: list[str]) -> tuple[int, str]:
    """The place and the text of the only fault of groups at places 0, 1, 2, ..."""
    faults = [draws.issued(f"g{place}", place, id) for place, id in enumerate(ids)]
    ((place, fault),) = [(place, fault) for place, fault in enumerate(faults) if fault]
    return place, fault


def record(stream: PromptStream, num: int) -> list[tuple[str, int, str]]:
    return [(f"g{place}", place, stream.prompt(place).id) for place in range(num)]


def test_a_resume_that_starts_late_is_named_at_its_first_group() -> None:
    stream, draws = make(100)
    assert draws.replay(record(stream, 40)) == ""
    assert draws.issued("g50", 50, stream.prompt(50).id) == (
        "g50 has place 50 of the stream after 40 groups: places 40 to 49 are skipped;"
        " stop the run: what it trains on is not what data.train says"
    )
    assert draws.issued("g51", 51, stream.prompt(51).id) == ""  # the first fault is the one to mend


def test_a_resume_that_starts_again_is_named_at_its_first_group() -> None:
    stream, draws = make(100)
    draws.replay(record(stream, 40))
    assert "after 40 groups: place 0 comes again" in draws.issued("g0", 0, stream.prompt(0).id)


def test_a_resume_that_draws_from_the_start_under_new_numbers_is_named() -> None:
    stream, draws = make(100)
    draws.replay(record(stream, 40))
    fault = draws.issued("g40", 40, stream.prompt(0).id)
    assert fault.startswith(f"place 40 draws the prompt {stream.prompt(0).id} again, before 60 of 100 prompts of")


def test_a_group_with_the_prompt_of_another_place_is_named() -> None:
    stream, draws = make(100)
    assert "g0 has place 7 of the stream after 0 groups" in draws.issued("g0", 7, stream.prompt(7).id)
    _, draws = make(100)
    assert "the group is not g0" in draws.issued("g7", 0, stream.prompt(0).id)


def test_the_next_draws_are_looked_at_before_the_first() -> None:
    stream, draws = make(100)
    assert draws.look_ahead(lambda place: stream.prompt(place).id) == ""
    assert draws.issued("g0", 0, stream.prompt(0).id) == ""  # looking ahead draws nothing
    draws.replay(record(stream, 40)[1:])
    assert "ahead of the first draw: place 70 draws the prompt" in draws.look_ahead(
        lambda place: stream.prompt(place if place < 47 else place + 30).id
    )


def test_a_resume_with_another_order_is_named_before_its_first_draw() -> None:
    stream, draws = make(100)
    draws.replay(record(stream, 40))
    other, _ = make(100, seed=1)
    assert "on record, and would now draw" in draws.look_ahead(lambda place: other.prompt(place).id)


@pytest.mark.parametrize("drawn", ["all", "without the longest", "without the longer half"])
def test_draws_that_prefer_short_rows_are_named_and_fair_ones_are_not(drawn: str) -> None:
    sizes = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64)
    share = {"all": 1.0, "without the longest": 0.9, "without the longer half": 0.5}[drawn]
    rows = np.flatnonzero(sizes <= np.quantile(sizes, share))
    faults = []
    for seed in range(20):
        test, order = SizeTest(sizes), np.random.default_rng(seed).permutation(rows)
        faults.append(next((place for place, row in enumerate(order[:5000], 1) if test.add(int(row))), None))
    if drawn == "all":
        assert faults == [None] * 20
    else:
        assert max(faults) <= 640  # 20 steps of 32 prompts


def test_a_record_with_a_gap_is_a_fault_before_any_new_group() -> None:
    stream, draws = make(100)
    groups = record(stream, 40)
    assert "g30 has place 30 of the stream after 29 groups: places 29 to 29" in draws.replay(
        groups[:29] + groups[30:]
    )


def test_an_epoch_without_its_longest_tenth_is_named_at_the_first_repeat() -> None:
    stream, draws = make(100)
    by_length = sorted((stream.prompt(place).id for place in range(100)), key=len)
    place, fault = first_fault(draws, by_length[:90] + by_length)
    assert place == 90
    assert "before 10 of 100 prompts of data.train.0 (e.g. train.0/" in fault
    assert fault.split("e.g. ")[1].split(")")[0] in by_length[90:]


def test_an_epoch_whose_first_half_comes_again_is_named_at_its_first_prompt() -> None:
    stream, draws = make(100)
    half = [stream.prompt(place).id for place in range(100, 150)]
    place, fault = first_fault(draws, [stream.prompt(place).id for place in range(100)] + half + half)
    assert place == 150
    assert fault.startswith(f"place 150 draws the prompt {half[0]} again, before 50 of 100 prompts")


def test_a_prompt_of_no_source_is_named() -> None:
    _, draws = make(3)
    assert draws.issued("g0", 0, "gsm8k/0").startswith(
        "g0 has the prompt gsm8k/0, which no source of data.train has"
    )


def test_a_source_that_is_drawn_more_than_its_weight_says_is_named() -> None:
    stream, draws = make(2000, 2000, weights=(3, 1))
    ids = [stream.prompt(place).id for place in range(4000)]
    _, fault = first_fault(draws, [id for id in ids if id.startswith("train.0/")])
    assert fault.startswith("data.train.0 has more than its 750 of 1000 draws at place 750, so another source has")


def test_a_row_that_the_first_epoch_by_signal_leaves_out_is_named() -> None:
    stream, draws = make(20, order="signal")
    ids = [stream.prompt(place).id for place in range(20)]
    place, fault = first_fault(draws, [*ids[:19], ids[3]])
    assert place == 19
    assert fault.startswith(
        f"place 19 ends the first epoch, before 1 of 20 prompts of data.train.0 (e.g. {ids[19]}) w"
    )


def test_a_row_that_comes_again_while_no_level_opens_is_named() -> None:
    stream, draws = make(20, order="curriculum", level_groups=1)
    for row in range(9):  # a level each
        stream.record_group(GroupRewards(row, f"train.0/{row}", (1.0,)))
    ids = [stream.prompt(place).id for place in range(20)]
    place, fault = first_fault(draws, [*ids[:17], ids[12]])
    assert place == 17
    assert "again, before 3 of 10 prompts of data.train.0 were" in fault


async def test_the_record_has_each_group_once_in_the_order_of_issue(tmp_path: Path) -> None:
    """Replaced samples, drops, undone steps and evaluations are no draws."""
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0", index=0)
        issue(ledger, "g1.0", index=1)
        ledger.append(Dropped("g1.0", DropReason.TOKENS_LOST))
        issue(ledger, "e0.0", index=0, kind=Kind.EVAL)
        ledger.append_all(consume(1, 0, "g0.0"))
        ledger.append_all([RolledBack(0, "learner_crashed"), Undone("g0.0", 1)])
        issue(ledger, "g2.0", index=2)
        issue(ledger, "g1.1", index=1)
        issue(ledger, "g2.1", index=2)
        await ledger.commit()
    expected = [("g0", 0, "p0"), ("g1", 1, "p1"), ("g2", 2, "p2")]
    assert list(issued_groups(tmp_path / LEDGER_NAME)) == expected


STOPS = st.lists(st.integers(0, 40), max_size=5)


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    weights=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
    order=st.sampled_from(["shuffled", "curriculum", "signal"]),
    stops=STOPS,
    data=st.data(),
)
def test_no_sound_history_has_a_fault(counts, weights, seed, order, stops, data) -> None:
    """Groups close with any rewards, late or never; a resumed run reads groups and rewards from the record."""
    settings = {"order": order, "weights": tuple(weights[: len(counts)]), "seed": seed, "level_groups": 2}
    on_record: list[tuple[str, int, str]] = []
    rewards: list[GroupRewards] = []
    for num in [*stops, 40]:
        stream, draws = make(*counts, **settings)
        for closed in rewards:
            stream.record_group(closed)
        assert draws.replay(on_record) == ""
        open_groups: list[tuple[int, str]] = []
        for place in range(len(on_record), len(on_record) + num):
            stream.prompt(place + 3)  # a look ahead is no draw
            id = stream.prompt(place).id
            assert draws.issued(f"g{place}", place, id) == ""
            on_record.append((f"g{place}", place, id))
            open_groups.append((place, id))
            if data.draw(st.booleans()):
                closing = open_groups.pop(data.draw(st.integers(0, len(open_groups) - 1)))
                closed = GroupRewards(*closing, data.draw(st.sampled_from([(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)])))
                rewards.append(closed)
                stream.record_group(closed)


@pytest.mark.parametrize("order", ["shuffled", "curriculum", "signal"])
def test_many_epochs_of_a_mixture_have_no_fault(order: str) -> None:
    stream, draws = make(7, 400, 50, weights=(3, 1, 1), order=order, level_groups=1)
    for place in range(3000):
        prompt = stream.prompt(place)
        assert draws.issued(f"g{place}", place, prompt.id) == ""
        stream.record_group(GroupRewards(place, prompt.id, (0.0, float(place % 3 > 0))))
