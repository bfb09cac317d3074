"""Options of commands that list or show trajectories: which trajectories, and by whose tokenizer."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from laminar_py.records.trajectory import DropReason, Kind, Status

_COMPARISON = "A comparison, e.g. '>3'"

OfStatus: TypeAlias = Annotated[Status | None, typer.Option("--status", help="Their status")]
OfReason: TypeAlias = Annotated[DropReason | None, typer.Option("--reason", help="Why they were dropped")]
OfKind: TypeAlias = Annotated[Kind | None, typer.Option("--kind", help="Of training, or of evaluations")]
OfGroup: TypeAlias = Annotated[
    str | None, typer.Option("--group", help="Their group, e.g. g17, or their evaluation pass, e.g. e4-aime")
]
OfPrompt: TypeAlias = Annotated[str | None, typer.Option("--prompt", help="Their prompt's id, e.g. p17")]
OfSet: TypeAlias = Annotated[str | None, typer.Option("--set", help="The evaluation set that they answer")]
OfReplica: TypeAlias = Annotated[int | None, typer.Option("--replica", help="The last replica that had them")]
OfVersion: TypeAlias = Annotated[
    int | None, typer.Option("--version", help="A weight version that made some of their tokens")
]
ByStaleness: TypeAlias = Annotated[str | None, typer.Option("--staleness", help=f"Learner steps. {_COMPARISON}")]
ByStep: TypeAlias = Annotated[str | None, typer.Option("--step", help=f"The step that used them. {_COMPARISON}")]
ByReward: TypeAlias = Annotated[str | None, typer.Option("--reward", help=_COMPARISON)]
ByLength: TypeAlias = Annotated[str | None, typer.Option("--length", help=f"Response tokens. {_COMPARISON}")]
OfModel: TypeAlias = Annotated[
    Path | None, typer.Option("--model", help="Folder with the tokenizer, if the run's model has moved")
]


def _conditions(
    status: OfStatus = None,
    reason: OfReason = None,
    kind: OfKind = None,
    eval_set: OfSet = None,
    group: OfGroup = None,
    prompt: OfPrompt = None,
    replica: OfReplica = None,
    version: OfVersion = None,
    staleness: ByStaleness = None,
    step: ByStep = None,
    reward: ByReward = None,
    length: ByLength = None,
) -> None:
    """Hold the options of all conditions, for `takes_conditions`."""


def takes_conditions(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of all conditions; it gets them as one argument `wanted`, the `Filters`."""
    conditions = inspect.signature(_conditions).parameters

    @functools.wraps(command)
    def run(*arguments: object, **given: object) -> None:
        from laminar_py.ledger.audit.queries import Filters

        wanted = Filters(**{name: given.pop(name) for name in conditions})  # type: ignore[arg-type]
        command(*arguments, **given, wanted=wanted)

    own = {name: one for name, one in inspect.signature(command).parameters.items() if name != "wanted"}
    merged = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (own | dict(conditions)).values()]
    run.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]  # typer reads both
    run.__annotations__ = {one.name: one.annotation for one in merged}
    return run
