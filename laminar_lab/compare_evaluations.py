"""Evaluations by `laminar eval` side by side: each set's figures, and the model that each evaluation was of.

`laminar compare` prints the tables, also of evaluations that are not finished.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Group
from rich.text import Text

from laminar_lab.compare import figures_table
from laminar_py.config.section import ConfigError
from laminar_py.ledger import read_evaluations
from laminar_py.records.evaluations import SetFigures

SOURCE = "source.json"  # in the folder of an evaluation


class EvaluatedModel(msgspec.Struct, frozen=True):
    """The evaluated weights, e.g. `EvaluatedModel("runs/math-1/checkpoints/step-40-1.0", 40)`."""

    path: str
    step: int  # of the checkpoint; 0 for a model folder


class ComparedEvaluation(msgspec.Struct, frozen=True):
    """An evaluation with its figures by set, e.g. `ComparedEvaluation("runs/eval-a-1", model, {"aime": ...})`."""

    run: str
    model: EvaluatedModel
    sets: dict[str, SetFigures]


def are_evaluations(runs: Sequence[Path]) -> bool:
    """Return whether all folders are of evaluations. Raises `ConfigError` if only some are."""
    found = [run for run in runs if (run / SOURCE).is_file()]
    if found and len(found) < len(runs):
        other = next(run for run in runs if run not in found)
        raise ConfigError(
            f"{found[0]}: is an evaluation and {other} is not; compare evaluations with evaluations, or evaluate"
            f" the other with `laminar eval {other}`"
        )
    return bool(found)


def read_evaluation(run: Path) -> ComparedEvaluation:
    """Read an evaluation. Raises `ConfigError` if it has no result yet."""
    model = msgspec.json.decode((run / SOURCE).read_bytes(), type=EvaluatedModel)
    sets = {result.set_name: result.figures for result in read_evaluations(run)}
    if not sets:
        raise ConfigError(f"{run}: no set is evaluated yet; wait for it, or continue it with --resume")
    return ComparedEvaluation(str(run), model, sets)


def evaluation_tables(evaluations: Sequence[ComparedEvaluation], *, width: int) -> Iterator[Group | Text]:
    """Yield lines that name the model of each evaluation, then a table of each set; tables fit `width` columns."""
    names = [Path(one.run).name for one in evaluations]
    heads = names if len(set(names)) == len(names) else [one.run for one in evaluations]
    for head, one in zip(heads, evaluations, strict=True):
        step = f", step {one.model.step}" if one.model.step else ""
        yield Text(f"{head}: {one.model.path}{step}")
    for name in dict.fromkeys(name for one in evaluations for name in one.sets):
        found = [one.sets.get(name) for one in evaluations]
        yield figures_table(f"\n{name}", heads, found, {}, width=width)
    yield Text("\nA mean has its 95 % interval over problems; means whose intervals hardly overlap differ.")
