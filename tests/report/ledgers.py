"""Small real runs with everything that becomes of trajectories, for tests of what is said of them."""

import numpy as np

from laminar_py.records.events import (
    Assigned,
    Consumed,
    Dropped,
    Interrupted,
    Ready,
    RolledBack,
    Scored,
    StepSkipped,
    Undone,
)
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind
from tests.builders import make_evaluated
from tests.events import finished, stepped
from tests.ledger.runs import begin, digest_of, issue, open_ledger, run_to, score

UNFINISHED = {DropReason.GROUP_DEADLINE, DropReason.VERSION_LOST}
UNSCORED = {DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT, DropReason.TOO_LONG}


def live(ledger, id, length, *, reward=1.0, to="ready"):
    """From issue on: `to` is "running", "finished", "scored" or "ready"."""
    issue(ledger, id)
    run_to(ledger, id, ((0, 0, length),) if length else ())
    if to == "running":
        return
    spans = (Span(0, 0, length),)
    ledger.append(finished(id, spans, digest=digest_of(ledger, id)))
    if to == "finished":
        return
    ledger.append(Scored(trajectory_id=id, reward=reward, elapsed_s=0.01))
    if to == "ready":
        ledger.append(Ready(id, 0.5))


def drop(ledger, id, length, reason, *, reward=1.0):
    """Dropped where that reason drops."""
    stage = "running" if reason in UNFINISHED else "finished" if reason in UNSCORED else "scored"
    live(ledger, id, length, reward=reward, to=stage)
    ledger.append(Dropped(id, reason))


def step(ledger, number, sizes, *, weights=None):
    """A step that consumes trajectories that are ready: `sizes` has the length of each."""
    weights = weights or {}
    ledger.append(stepped(number, num_trajectories=len(sizes), num_tokens=sum(sizes.values())))
    for id in sizes:
        ledger.append(
            Consumed(
                trajectory_id=id,
                step=number,
                version=number - 1,
                staleness=number - 1,
                weight=weights.get(id, 1.0),
            )
        )


def undo(ledger, number, *ids):
    """Go back behind step `number`."""
    ledger.append(RolledBack(number - 1, "learner_crashed"))
    for id in ids:
        ledger.append(Undone(id, number))


async def write_small_run(run):
    """Ten trajectories of 103 tokens; what became of each is known, see `test_tokens`."""
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(0, 1, 2, 3))
        live(ledger, "g0.0", 10)
        live(ledger, "g0.1", 20)
        step(ledger, 1, {"g0.0": 10, "g0.1": 20}, weights={"g0.1": 0.5})
        live(ledger, "g1.0", 5)
        step(ledger, 2, {"g1.0": 5})
        undo(ledger, 2, "g1.0")
        step(ledger, 2, {"g1.0": 5})
        live(ledger, "g2.0", 7)
        step(ledger, 3, {"g2.0": 7})
        ledger.append(StepSkipped(3, 1, 1, ("g2.0",)))
        drop(ledger, "g3.0", 8, DropReason.NO_SIGNAL, reward=1.0)
        drop(ledger, "g4.0", 9, DropReason.NO_SIGNAL, reward=0.0)
        drop(ledger, "g5.0", 11, DropReason.STALE)
        drop(ledger, "g6.0", 12, DropReason.GROUP_DEADLINE)
        drop(ledger, "g7.0", 6, DropReason.REWARD_FAILED)
        issue(ledger, "g8.0")
        run_to(ledger, "g8.0", ((0, 0, 15),))
        ledger.append(Interrupted(trajectory_id="g8.0", epoch=1, length=15, reason="repacked"))
        ledger.append(Assigned("g8.0", 1, 2, 15))
        for place, reward in enumerate((1.0, 0.0)):
            id, spans = f"e0-heldout.{place}", ((3, 0, 7 * (place + 1)),)
            issue(ledger, id, kind=Kind.EVAL)
            run_to(ledger, id, spans)
            score(ledger, id, spans, reward=reward)
        ledger.append(make_evaluated(problems=2, length=7))


def random_ledger(draws):
    """What `draws`, a list of (fate, length, reward, weight), tells to append to a ledger."""

    def write(ledger):
        begin(ledger, versions=(0, 1))
        consumed = {}
        for place, (fate, length, reward, weight) in enumerate(draws):
            id = f"g{place}.0"
            if fate == "consumed":
                live(ledger, id, length, reward=reward)
                consumed[id] = length, weight
            elif isinstance(fate, DropReason):
                drop(ledger, id, length, fate, reward=reward)
            else:
                live(ledger, id, length, reward=reward, to=fate)
        sizes = {id: length for id, (length, _) in consumed.items()}
        step(ledger, 1, sizes, weights={id: weight for id, (_, weight) in consumed.items()})

    return write


def useful(draws):
    """What `random_ledger` has to come to."""
    return round(sum(np.float32(weight) * length for fate, length, _, weight in draws if fate == "consumed"))
