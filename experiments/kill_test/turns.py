"""The kill test over several turns: environments die, and replicas and controllers with turns that are under way.

`python experiments/kill_test/turns.py [--kills 20] [--seed 0] [--only VICTIM ...] [--json] [key=value ...]`
trains what turns.yaml says. At the end every law holds, no trajectory was lost with its environment, which can be
saved, and no turn that was answered was taken twice. Exit code 1 if it is not so.
"""

import random
import tempfile
from collections import Counter
from pathlib import Path

from run import CONTROLLER, EVERYTHING, Run, campaign, check, make_parser, proof

from laminar_lab.bench.report import Row, show
from laminar_py.ledger.audit.queries import accounting
from laminar_py.ledger.database import reading
from laminar_py.records.spans import decode_spans, num_turns
from laminar_py.records.trajectory import DropReason

VICTIMS = ("environment-0", "environment-1", "replica-0", "replica-1", "learner-0", CONTROLLER, EVERYTHING)
LOST = (DropReason.ENVIRONMENT_LOST, DropReason.ENVIRONMENT_FAILED, DropReason.ENVIRONMENT_TIMEOUT)


def turn_rows(run: Run, log: Path) -> tuple[list[Row], bool]:
    """Rows on turns, and whether all is as it should be."""
    answered = Counter(line.rpartition(" ")[0] for line in set(log.read_text().splitlines()))
    twice = sum(count - 1 for count in answered.values())
    dropped = accounting(run.folder).train.dropped
    lost = sum(dropped.get(reason, 0) for reason in LOST)
    with reading(run.folder) as connection:
        found = connection.execute("SELECT spans FROM trajectory WHERE status = 'consumed' AND kind = 'train'")
        turns = [num_turns(decode_spans(spans)) for (spans,) in found]
    conditions = f"{len(turns)} trajectories, {sum(turns) / len(turns):.2f} turns each"
    rows = [
        Row("turns_answered", len(answered), "turns with another after them", conditions),
        Row("turns_answered_twice", twice, "turns", "by the environments' own file"),
        Row("trajectories_lost_with_environments", lost, "trajectories", conditions),
    ]
    return rows, not twice and not lost


def main() -> None:
    """Kill, resume, prove."""
    args = make_parser(__doc__, victims=VICTIMS, steps=300).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "turns"
        settings = [f"seed={args.seed}", f"steps={args.steps}", f"environment.arguments={{log: {log}}}"]
        run = Run(Path(__file__).with_name("turns.yaml"), [*settings, *args.settings])
        done = campaign(run, args.only, args.kills, args.pause, random.Random(args.seed))
        check(run.finish() == 0, "the last incarnation did not finish")
        rows, holds = proof(run, done)
        more, right = turn_rows(run)
    show("kill_test", [*rows, *more], as_json=args.json)
    check(holds and right, "see the table")


if __name__ == "__main__":
    main()
