"""The numerator of goodput, from real ledgers."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.tokens import account_tokens
from laminar_py.records.events import Cut
from laminar_py.records.trajectory import DropReason
from tests.depth import examples
from tests.ledger.runs import begin, consume, finish, issue, open_ledger, run_to
from tests.report.builders import make_step_row, write_rows
from tests.report.ledgers import random_ledger, useful, write_small_run

FATES = st.one_of(
    st.sampled_from(["consumed", "running", "finished", "scored", "ready"]), st.sampled_from(sorted(DropReason))
)
DRAWS = st.lists(
    st.tuples(FATES, st.integers(1, 60), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([1.0, 0.75, 0.4])),
    max_size=12,
)


def account(run):
    write_rows(run / "metrics.jsonl", [make_step_row(1, 10.0)])
    return account_tokens(read_snapshot(run))


async def test_every_token_of_a_small_run_is_where_it_belongs(tmp_path):
    await write_small_run(tmp_path)
    found = account(tmp_path)
    assert {loss.name: loss.tokens for loss in found.losses} == {
        "group deadline": 12,
        "scoring failed": 6,
        "dropped as stale": 11,
        "no signal: all right": 8,
        "no signal: all wrong": 9,
        "still live": 15,
        "step skipped": 7,
        "counted less as stale": 10,
    }
    assert (found.issued, found.useful, found.goodput) == (103, 25, 2.5)
    assert (found.recomputed, found.cut) == (3 + 15, 0)
    assert found.undone == 5


async def test_what_was_cut_and_masked_from_the_loss_is_not_useful(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", ((0, 0, 5),))
        ledger.append(Cut("g0.0", "tokens", 5))
        finish(ledger, "g0.0", ((0, 0, 5),))
        ledger.append_all(consume(1, 0, "g0.0", weight=0.0))
    found = account(tmp_path)
    assert {loss.name: loss.tokens for loss in found.losses} == {"cut, masked from the loss": 5}
    assert (found.useful, found.useful_trajectories, found.cut) == (0, 0, 0)


@given(DRAWS)
@settings(max_examples=examples(30), deadline=None)
def test_issued_is_the_sum_of_the_losses_and_what_is_useful(draws):
    async def write(run):
        async with open_ledger(run) as ledger:
            random_ledger(draws)(ledger)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(write(Path(folder)))
        found = account(Path(folder))
    assert found.issued == sum(length for _, length, _, _ in draws)
    assert found.issued == found.useful + sum(loss.tokens for loss in found.losses)
    assert abs(found.useful - useful(draws)) <= 1, "rounded once"
    assert len(draws) == found.useful_trajectories + sum(loss.trajectories for loss in found.losses)
