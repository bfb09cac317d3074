"""A run whose model, data and verifier wrote hostile texts, under several versions, for tests of the page."""

from itertools import pairwise

import numpy as np

from laminar_lab.report.page import write_page
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_py.config.loading import dump_config, load_config
from laminar_py.records.columns import token_values
from laminar_py.records.events import Dropped, Interrupted, Ready
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind
from tests.ledger.runs import begin, consume, open_ledger
from tests.report.scripted import CONFIG
from tests.samples.runs import (
    HOSTILE,
    begin_sample,
    encode,
    end_sample,
    evaluated,
    grow_sample,
    make_model,
    write_sample,
)

EVIL = (
    "</script><script>window.hit=1</script><img src=x onerror='window.hit=2'><!-- {{data}} ${window.hit=3} \u2028"
)
MIXED = (EVIL + "\n\n" + "\n".join(HOSTILE)) * 2


async def write_run(folder, *, long=0):
    """A finished group of two by three versions, a dropped one, an evaluation; `long` tokens in one more."""
    model, run = make_model(folder / "model"), folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(load_config(CONFIG, [f"model.path={model}"])))
    ids = encode(model, MIXED)
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(0, 1, 2, 3))
        bounds = [0, len(ids) // 3, len(ids) // 2, len(ids)]
        asked = {"prompt": EVIL, "answer": EVIL, "problem": "p'\"<b>"}
        begin_sample(ledger, "g0.0", **asked)
        for epoch, (start, end) in enumerate(pairwise(bounds), 1):
            grow_sample(ledger, "g0.0", ids[start:end], start=start, version=epoch, replica=epoch % 2, epoch=epoch)
            if end < len(ids):
                stopped = Interrupted(trajectory_id="g0.0", epoch=epoch, length=end, reason="new weights")
                ledger.append(stopped)
        spans = [Span(version, *found) for version, found in enumerate(pairwise(bounds), 1)]
        columns = {"hints": token_values((np.arange(len(ids)) % 5).astype(np.float32))}
        end_sample(ledger, "g0.0", ids, spans, epoch=3, verdict=EVIL, said=EVIL, columns=columns)
        ledger.append(Ready("g0.0", 0.5))
        write_sample(ledger, "g0.1", encode(model, "4"), reward=0.0, **asked)
        ledger.append_all(consume(1, 3, "g0.0", "g0.1", staleness=2))
        write_sample(ledger, "g1.0", encode(model, "é!"), problem="p1", reward=0.5)
        ledger.append(Dropped("g1.0", DropReason.STALE, EVIL))
        for place in range(3):
            id = f"e{place}-heldout.0"
            write_sample(
                ledger, id, encode(model, "five"[: place + 2]), problem="p2", kind=Kind.EVAL, reward=place / 2
            )
            evaluated(ledger, id)
        if long:
            some = np.resize(encode(model, "The <b>answer</b> is 42.\n"), long)
            write_sample(ledger, "g2.0", some, problem="p3")
    return run


def write_report(run):
    return write_page(RunReport(read_snapshot(run)))
