"""A run goes on after its controller or its learner died."""

import numpy as np
import pytest

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import LEDGER_NAME, segments_path
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.records.columns import token_values
from laminar_py.records.credit import RoleCredit
from laminar_py.records.events import (
    Dropped,
    Interrupted,
    Ready,
    RefillStopped,
    Relayed,
    Restamped,
    RolledBack,
    Undone,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind, Status
from laminar_py.records.weights import Published
from tests.builders import make_experts, make_mask
from tests.ledger.runs import (
    begin,
    checkpoint,
    consume,
    finish,
    issue,
    make_ready,
    open_ledger,
    recording,
    run_to,
    score,
    store,
    store_columns,
    tokens,
    undo_since,
)
from tests.ledger.scans import scans_of_the_log, statements


def response_of(run, live):
    """The response that the references of a live trajectory lead to."""
    return PayloadReader(segments_path(run)).load(one.at for one in live.tokens).response(live.tokens)


async def test_a_partial_response_goes_on_exactly_where_it_was(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "g3.1", index=3)
        run_to(ledger, "g3.1", [(0, 0, 3), (1, 3, 4), (1, 4, 9)], epoch=2)
    (live,) = recover(tmp_path).live
    response, (ids, logprobs) = response_of(tmp_path, live), tokens("g3.1", 0, 9)
    assert np.array_equal(response.ids, ids)
    assert np.array_equal(response.logprobs, logprobs)
    assert live.token_spans == response.spans == (Span(0, 0, 3), Span(1, 3, 9))
    assert (live.status, live.epoch, live.sample_index, live.prompt.index) == (Status.RUNNING, 2, 1, 3)
    assert (live.prompt.text, live.prompt.ids.tolist()) == ("prompt 3", [2, 3, 4])
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, incarnation=2, versions=())
        ledger.append(Interrupted(trajectory_id="g3.1", epoch=2, length=9, reason="controller_crashed"))
        run_to(ledger, "g3.1", [(1, 9, 12)], epoch=3, start=9)
        finish(ledger, "g3.1", [(0, 0, 3), (1, 3, 12)], epoch=3)
    assert verify(tmp_path) == []


async def test_the_time_that_a_trajectory_has_used_comes_back(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for name in ("g3.1", "g3.2"):
            issue(ledger, name)
            run_to(ledger, name, [(0, 0, 3)], epoch=1, start=0)
        for epoch, used_s in ((1, 4.0), (2, 6.5)):
            if epoch > 1:
                run_to(ledger, "g3.1", [(0, 3, 4)], epoch=epoch, start=3)
            ledger.append(
                Interrupted(trajectory_id="g3.1", epoch=epoch, length=2 + epoch, reason="stopped", used_s=used_s)
            )
        run_to(ledger, "g3.1", [(0, 4, 5)], epoch=3, start=4)
    assert {live.id: live.used_s for live in recover(tmp_path).live} == {"g3.1": 6.5, "g3.2": 0.0}


async def test_credit_of_roles_comes_back_with_its_advantages(tmp_path):
    def credit(advantage=0.0):
        return (RoleCredit(role="black", reward=1.0, turns=(1,), advantage=advantage),)

    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for sample in range(3):
            issue(ledger, f"g0.{sample}")
            run_to(ledger, f"g0.{sample}", [(0, 0, 5)])
            score(ledger, f"g0.{sample}", [(0, 0, 5)], roles=credit() if sample else ())
        ledger.append(Ready("g0.2", 0.5, 1.0, credit(0.5)))
    live = recover(tmp_path).live
    assert [entry.roles for entry in live] == [(), credit(), credit(0.5)]


async def test_what_refill_has_seen_since_the_last_step_comes_back(tmp_path):
    def drop(ledger, group, reward):
        for sample in range(2):
            issue(ledger, f"{group}.{sample}")
            run_to(ledger, f"{group}.{sample}", [(0, 0, 5)])
            score(ledger, f"{group}.{sample}", [(0, 0, 5)], reward=reward)
        for sample in range(2):
            ledger.append(Dropped(f"{group}.{sample}", DropReason.NO_SIGNAL))

    def hollow(num_without_signal):
        return RefillStopped(
            step=2, num_wanted=2, num_taken=0, num_without_signal=num_without_signal, num_best=0, num_worst=0
        )

    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        drop(ledger, "g0", -1.0)
        make_ready(ledger, "g1.0")
        ledger.append_all(consume(1, 0, "g1.0"))
        drop(ledger, "g2", 0.0)
        drop(ledger, "g3", 2.0)
        await ledger.commit()
        assert recover(tmp_path).refilled == (0.0, 2.0)
        ledger.append(hollow(2))
        drop(ledger, "g4", 0.5)
    recovered = recover(tmp_path)
    assert (recovered.refilled, recovered.rewards) == ((0.5,), (-1.0, 2.0))


async def test_recovery_knows_every_counter_of_the_run(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1, 2))
        for sample in range(3):
            issue(ledger, f"g7.{sample}", index=7)
        ledger.append(Dropped("g7.2", DropReason.VERSION_LOST))
        make_ready(ledger, "e0.0", kind=Kind.EVAL, index=900)
        make_ready(ledger, "e1.0", kind=Kind.EVAL, index=900)
    recovered = recover(tmp_path)
    assert (recovered.incarnation, recovered.checkpoint) == (2, None)
    assert (recovered.next_prompt, recovered.next_evaluation) == (8, 2)
    assert recovered.next_sample == {"g7": 3, "e0": 1, "e1": 1}
    assert recovered.events == ()


async def test_a_partial_response_goes_on_with_its_masks_its_experts_and_corrected_spans(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1, 2))
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 3), (1, 3, 5)], recorded=True)
        ledger.append(Restamped("g0.0", (Span(0, 0, 4), Span(1, 4, 5, 0))))
        store(ledger, "g0.0", 5, 6, (Span(2, 5, 6),), **recording("g0.0", 5, 6))
    (live,) = recover(tmp_path).live
    response = response_of(tmp_path, live)
    assert live.token_spans == (Span(0, 0, 4), Span(1, 4, 5, 0), Span(2, 5, 6))
    assert live.tokens[-1].routed == 8
    assert response.sampling_mask.ids.tolist() == make_mask(response.ids).ids.tolist()
    assert response.routed_experts == make_experts(0, 8)
    assert verify(tmp_path) == []


async def test_columns_come_back(tmp_path):
    columns = {
        "token_rewards": token_values(np.array([0, 0, 1, 0, 2], np.float32)),
        "hints": token_values(np.arange(5, dtype=np.int32)),
    }
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0")
        store_columns(ledger, "g0.0", columns)
    (live,) = recover(tmp_path).live
    loaded = PayloadReader(segments_path(tmp_path)).load(column.at for column in live.columns.values())
    found = {name: loaded.column(column) for name, column in live.columns.items()}
    assert {name: piece.values for name, piece in found.items()} == columns
    assert {name: piece.name for name, piece in found.items()} == {name: name for name in columns}
    assert {name: column.dtype for name, column in live.columns.items()} == {
        name: values.dtype for name, values in columns.items()
    }
    assert (live.reward, live.advantage) == (1.0, 0.5)


async def run_past_its_checkpoint(ledger):
    begin(ledger, versions=(0, 1, 2))
    for step in (1, 2, 3):
        ids = [f"g{step}.{i}" for i in range(2)]
        for id in ids:
            make_ready(ledger, id, index=step)
        ledger.append_all(consume(step, step - 1, *ids))
        if step == 1:
            ledger.append(checkpoint(1, 1))


async def test_what_was_consumed_after_the_checkpoint_is_ready_again(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await run_past_its_checkpoint(ledger)
        make_ready(ledger, "e0.0", kind=Kind.EVAL)
        ledger.append(consume(-1, 2, "e0.0")[1])
    recovered = recover(tmp_path)
    assert recovered.checkpoint == checkpoint(1, 1)
    assert recovered.events[0] == RolledBack(1, "controller_crashed")
    assert recovered.events[1:] == tuple(Undone(f"g{s}.{i}", s) for s in (2, 3) for i in range(2))
    assert {t.id: t.status for t in recovered.live} == {
        e.trajectory_id: Status.READY for e in recovered.events[1:]
    }
    assert all(len(response_of(tmp_path, t).ids) == 5 for t in recovered.live)


async def test_undone_trajectories_are_consumed_again_and_the_laws_hold(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await run_past_its_checkpoint(ledger)
    recovered = recover(tmp_path)
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, incarnation=recovered.incarnation, versions=())
        ledger.append_all(recovered.events)
        await ledger.commit()
        assert verify(tmp_path) == []
        ledger.append_all(consume(2, 2, *(t.id for t in recovered.live)))
    assert accounting(tmp_path).train.consumed == 6
    assert verify(tmp_path) == []
    assert len(recover(tmp_path).events) == 5


async def test_a_learner_that_died_alone_is_undone_in_the_running_ledger(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await run_past_its_checkpoint(ledger)
        events = await undo_since(ledger, 1, reason="learner_crashed")
        ledger.append_all(events)
        assert len(events) == 5
        assert await undo_since(ledger, 1, reason="learner_crashed") == []
        ledger.append_all(consume(2, 2, "g2.0", "g2.1"))
        ledger.append(checkpoint(2, 2))
    assert recover(tmp_path).checkpoint == checkpoint(2, 2)
    assert verify(tmp_path) == []


HELD = {"num_bytes": 10, "base": None, "wire_bytes": 0, "first_byte_s": 0.0, "elapsed_s": 0.0}
RELAYED = Relayed(node="relay-0", version=3, digest="digest3", **HELD)
LOADED = VersionLoaded(replica=0, version=3, digest="digest3", elapsed_s=0.1)


@pytest.mark.parametrize(
    ("spoken", "num_bytes"),
    [([RELAYED], 10), ([LOADED], 0), ([RELAYED, LOADED], 10)],
    ids=["relayed", "loaded", "both"],
)
async def test_a_version_that_anybody_had_is_never_numbered_again(tmp_path, spoken, num_bytes):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        for event in spoken:  # and the learner dies before it says what it published
            ledger.append(event)
        assert (ledger.newest_version, ledger.newest_published) == (3, 1)
        assert ledger.unpublished() == [Published(3, "digest3", num_bytes, 0.0)]
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, incarnation=2, versions=())
        assert (ledger.newest_version, ledger.newest_published) == (3, 1)
        for orphan in ledger.unpublished():
            made = {"version": orphan.version, "digest": orphan.digest, "num_bytes": orphan.num_bytes}
            ledger.append(VersionPublished(**made, step=1, incarnation=2, parent=1, stall_s=0.0))
        assert ledger.unpublished() == []
    assert verify(tmp_path) == []


async def test_a_resume_reads_the_log_once_for_ages_and_once_for_versions_and_a_dead_learner_not_at_all(
    tmp_path, monkeypatch
):
    async with open_ledger(tmp_path) as ledger:
        await run_past_its_checkpoint(ledger)
        issue(ledger, "g9.0", index=9)
        run_to(ledger, "g9.0", [(0, 0, 3)])
        ledger.append(Interrupted(trajectory_id="g9.0", epoch=1, length=3, reason="stopped", used_s=4.0))
        ledger.append(RELAYED)
    path = tmp_path / LEDGER_NAME
    with statements(monkeypatch) as asked:
        assert [one.used_s for one in recover(tmp_path).live if one.id == "g9.0"] == [4.0]
    (ages,) = scans_of_the_log(path, asked)
    assert "stepped" in ages
    with statements(monkeypatch) as asked:
        async with open_ledger(tmp_path) as ledger:
            (versions,) = scans_of_the_log(path, asked)
            assert "relayed" in versions
            asked.clear()
            assert [one.version for one in ledger.unpublished()] == [3]
            assert asked == []
