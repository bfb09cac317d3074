"""`laminar rescore`: compute every reward of a run again from its record.

Exit codes: 0 every reward is as recorded, 1 a reward differs, 2 bad input.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laminar_lab.commands.reward import score_and_print

if TYPE_CHECKING:
    from laminar_py.records.scoring import ScoringRequest

app = typer.Typer()


@app.command(epilog="Example: laminar rescore runs/quickstart-1")
def rescore(
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    overrides: Annotated[list[str] | None, typer.Argument(help=r"Settings, e.g. 'reward.use=\[math]'")] = None,
) -> None:
    """Compute every reward of a run again from its record, and list rewards that differ from the record."""
    from laminar_lab.audit.rescoring import RecordedScore, recorded_scores
    from laminar_py.config import load_config
    from laminar_py.ledger import RunFolder

    settings = load_config(RunFolder(run).config, [f"runs={run.resolve().parent}", *(overrides or [])])
    known: dict[str, RecordedScore] = {}

    def requests() -> Iterable["ScoringRequest"]:
        for recorded in recorded_scores(run):
            known[recorded.request.trajectory_id] = recorded
            yield recorded.request

    score_and_print(
        settings,
        requests(),
        lambda score: known.pop(score.trajectory_id).difference(score, settings.reward),
        failures=False,
    )
