"""The kill test over several turns: environments die, and replicas and controllers with turns that are under way.

`python experiments/kill_test/turns.py [--kills 20] [--seed 0] [--only VICTIM ...] [--json] [key=value ...]` trains
the run of turns.yaml. At the end every law must hold; no trajectory may be lost with its environment, which can be
saved; and no answered turn may be taken twice. Otherwise the exit code is 1.
"""

import tempfile
from collections import Counter
from pathlib import Path

from run import CONTROLLER, EVERYTHING, Run, kill_and_prove, make_arguments, run_settings

from laminar_lab.audit.queries import accounting
from laminar_lab.bench.report import Row
from laminar_py.ledger.database import reading
from laminar_py.records.spans import decode_spans, num_turns
from laminar_py.records.trajectory import DropReason

VICTIMS = ("environment-0", "environment-1", "replica-0", "replica-1", "learner-0", CONTROLLER, EVERYTHING)
LOST = (DropReason.ENVIRONMENT_LOST, DropReason.ENVIRONMENT_FAILED, DropReason.ENVIRONMENT_TIMEOUT)


def turn_rows(run: Run, log: Path) -> tuple[list[Row], bool]:
    """Make the rows on turns; also return whether none was taken twice and no trajectory was lost."""
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
    args = make_arguments(__doc__, victims=VICTIMS, steps=300).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "turns"
        settings = [f"environment.arguments={{log: {log}}}", *run_settings(args)]
        run = Run(Path(__file__).with_name("turns.yaml"), settings)
        kill_and_prove(run, args, name="kill_test", judge=lambda run: turn_rows(run, log))


if __name__ == "__main__":
    main()
