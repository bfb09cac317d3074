"""A controller that never ends by itself, for the crash test: recovers, runs steps, says what is committed.

Usage: python -m tests.ledger.crashing_run FOLDER [network]. One line on stdout for each step that is on disk; with
`network` its ledger is written as if FOLDER were on a network file system.
"""

import asyncio
import sys
from pathlib import Path

from laminar_py.ledger import database
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Interrupted
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Status
from tests.events import version_published
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
    store,
)


async def lead(folder: Path) -> None:
    recovered = recover(folder) if RunFolder(folder).has_ledger else None
    async with open_ledger(folder) as ledger:
        incarnation = recovered.incarnation if recovered else 1
        version = ledger.newest_version + 1
        begin(ledger, incarnation=incarnation, versions=(version,))
        if recovered:
            ledger.append_all(recovered.events)
        await ledger.commit()
        step = recovered.checkpoint.step if recovered and recovered.checkpoint else 0
        ready = [t.id for t in recovered.live if t.status is Status.READY] if recovered else []
        for trajectory in recovered.live if recovered else ():
            if trajectory.status is Status.RUNNING:
                length = trajectory.tokens[-1].end if trajectory.tokens else 0
                ledger.append(
                    Interrupted(
                        trajectory_id=trajectory.id,
                        epoch=trajectory.epoch,
                        length=length,
                        reason="controller_crashed",
                    )
                )
        await train(ledger, step, version, recovered.next_prompt if recovered else 0, ready)


async def train(ledger, step, version, prompt, ready):
    for index in range(prompt, 10**9):
        ids = [f"g{index}.{i}" for i in range(4)]
        for id in ids[:3]:
            make_ready(ledger, id, index=index)
        issue(ledger, ids[3], index=index)
        run_to(ledger, ids[3], [(0, 0, 3)], recorded=True)
        await asyncio.sleep(0)
        store(ledger, ids[3], 3, 5, (Span(0, 3, 5),), **recording(ids[3], 3, 5))
        finish(ledger, ids[3], [(0, 0, 5)])
        step += 1
        used, ready = ready + ids, []
        ledger.append_all(consume(step, version, *used))
        ledger.append(version_published(version + 1, step=step, parent=version, stall_s=0.1))
        version += 1
        if step % 5 == 0:
            ledger.append(checkpoint(step, version))
        await ledger.commit()
        sys.stdout.write(f"{step} {len(used)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    database.on_network = lambda folder: "network" in sys.argv
    asyncio.run(lead(Path(sys.argv[1])))
