"""`laminar data`: show and check the problems of a run, or of a file, before GPUs are paid for.

Exit codes: 0 a run accepts the problems; 1 some are too long, lack a field of their reward, or leak from training
into an evaluation set; 2 bad input.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError
from laminar_py.records.host import visible

if TYPE_CHECKING:
    from laminar_lab.doctor.problem_figures import SourceFigures
    from laminar_py.config.reward import RewardConfig
    from laminar_py.data import Demonstrations, PromptEncoder
    from laminar_py.runtime.preflight import Problems

MOST_TOKENS = 200  # of a demonstration's prompt or response that are shown
MOST_NAMES = 20  # fields or tasks whose counts are shown
CONFIGS = (".yaml", ".yml")
app = typer.Typer()


@app.command(epilog="Example: laminar data configs/quickstart.yaml")
def data(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="YAML file of a run; or, with --model, a file, a folder or a name on the hub"
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the run, e.g. data.order=signal")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model folder: its tokenizer and chat template are used")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a folder or of a data set on the hub")] = "train",
    subset: Annotated[str | None, typer.Option(help="Subset of a data set on the hub")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="One of our fields and its column, e.g. prompt=question")
    ] = None,
) -> None:
    """Show problems as the model will get them: lengths, fields, tasks, levels, one rendered prompt, duplicates,
    leaks between training and evaluation, and problems that are too long."""
    if subject.endswith(CONFIGS):
        if model is not None or subset is not None or column or split != "train":
            raise ConfigError(
                f"config={subject}: a config names its model and sources; change them by settings, not by options"
            )
        _show_run(Path(subject), overrides or [])
    else:
        if overrides:
            raise ConfigError(f"{overrides[0]}: {subject} is no config, so it has no settings; leave it out")
        _show_source(subject, model, split, subset, column or [])


def _show_run(path: Path, overrides: list[str]) -> None:
    """Show all sources of a run's config."""
    from laminar_py.config import load_config
    from laminar_py.config.data import PromptOrder
    from laminar_py.config.warm_start import WARM_STARTS
    from laminar_py.data import PromptEncoder, load_tokenizer, read_levels
    from laminar_py.runtime.preflight import check_functions, check_model, prepare, prompt_room, read_problems

    config = load_config(path, overrides)
    prepare(config)
    check_model(config, needs_weights=False)
    check_functions(config)
    encoder = PromptEncoder(
        load_tokenizer(config.model.path), config.model.path, config.data.chat, config.environment
    )
    problems = read_problems(config, encoder, limited=False)
    if config.data.order is PromptOrder.CURRICULUM:
        for training in problems.train:
            read_levels(training, config.data.level)
    room = prompt_room(config)
    limits = {training.source.field: room[""] for training in problems.train}
    limits |= {heldout.source.field: room[name] for name, heldout in problems.sets.items()}
    demonstrations = None
    if config.warm_start is not None:
        demonstrations = WARM_STARTS.get(config.warm_start.kind).read(config, encoder)
        limits["warm_start.data"] = demonstrations.max_tokens
    faults = _reward_faults(config.reward, problems)
    _show(problems, encoder, level=config.data.level, limits=limits, demonstrations=demonstrations, faults=faults)


def _reward_faults(reward: "RewardConfig", problems: "Problems") -> list[str]:
    """Message on the first problem that lacks a field of its reward, as a run would print it; empty if none
    does."""
    from laminar_py.runtime.preflight import check_problems

    try:
        check_problems(reward, problems.all)
    except ConfigError as error:
        return [str(error)]
    return []


def _show_source(path: str, model: Path | None, split: str, subset: str | None, columns: list[str]) -> None:
    """Show one source that the command line names."""
    from laminar_py.config.data import ChatConfig, SourceConfig
    from laminar_py.data import DataSource, PromptEncoder, load_tokenizer, read_prompts
    from laminar_py.runtime.preflight import Problems

    if model is None:
        raise ConfigError(
            f"data={path}: counts tokens; name the model's folder with --model, or give a run's YAML"
        )
    mapped = dict(one.partition("=")[::2] for one in columns)
    if not all(mapped.values()):
        raise ConfigError(f"--column {columns[0]}: no column named; write ours=theirs, e.g. prompt=question")
    source = DataSource("data", SourceConfig(path=path, split=split, subset=subset, columns=mapped))
    encoder = PromptEncoder(load_tokenizer(model), model, ChatConfig())
    problems = read_prompts(source, encoder=encoder, max_prompt_tokens=None)
    _show(Problems([problems], {}), encoder, level="level", limits={})


def _show(
    problems: "Problems",
    encoder: "PromptEncoder",
    *,
    level: str,
    limits: dict[str, int],
    demonstrations: "Demonstrations | None" = None,
    faults: Sequence[str] = (),
) -> None:
    """Print figures of all sources. Exit code 1 where a run would refuse the problems.

    `limits` has the most tokens of a prompt or demonstration by field of the config, `faults` messages on faults
    that were found before.
    """
    from laminar_lab.doctor.problem_figures import demonstration_figures, leaks, source_figures, unknown_words
    from laminar_py.runtime.preflight import shown_prompt

    figures = {
        (field := of.source.field): source_figures(of, level=level, max_prompt_tokens=limits.get(field))
        for of in problems.all
    }
    if demonstrations is not None:
        field = demonstrations.source.field
        figures[field] = demonstration_figures(demonstrations, max_tokens=limits.get(field))
    console.print(_table(figures))
    for field, shown in figures.items():
        _print_counts(f"{field}: fields", shown.fields)
        named = {task or "(none)": number for task, number in shown.tasks.items()}
        _print_counts(f"{field}: tasks", {} if list(shown.tasks) == [""] else named)
        _print_counts(f"{field}: levels", shown.levels)
    for field, words in unknown_words(problems.all, demonstrations, encoder=encoder).items():
        number = f"{words.number:,} words become" if words.number > 1 else "1 word becomes"
        first = f"the first {words.first!r} in {words.place}"
        print_line(f"{field}: {number} the tokenizer's unknown token, {first}", style="yellow")
    print_line(shown_prompt(problems.all[0][0], encoder.tokenizer, opening=encoder.opening))
    if demonstrations is not None and demonstrations.all:
        print_line(_shown_demonstration(demonstrations, encoder))
    prompts = {of.source.field for of in problems.all}
    long = [
        _too_long(field, of, limits[field], field in prompts) for field, of in figures.items() if of.num_too_long
    ]
    refusals = [*long, *leaks(problems), *faults]
    for refusal in refusals:
        print_line(refusal, style="red")
    if refusals:
        raise typer.Exit(1)


def _shown_demonstration(demonstrations: "Demonstrations", encoder: "PromptEncoder") -> str:
    """Return lines with the tokens of the first demonstration: of its prompt, and of the response to learn."""
    first = demonstrations.all[0]
    rows = [
        f"  {name} {' '.join(repr(encoder.tokenizer.word(id)) for id in ids.tolist()[:MOST_TOKENS])}"
        + (f" and {len(ids) - MOST_TOKENS:,} more" if len(ids) > MOST_TOKENS else "")
        for name, ids in (("prompt", first.prompt_ids), ("response", first.response_ids))
    ]
    title = f"demonstration {demonstrations.source.place(first.row)}, {len(first.response_ids)} tokens to learn"
    return "\n".join([title, *rows])


def _too_long(field: str, figures: "SourceFigures", limit: int, prompts: bool) -> str:
    """Message on a source with prompts, or demonstrations, above the limit."""
    kind = "prompt" if prompts else "demonstration"
    have = f"{figures.num_too_long:,} {kind}s have" if figures.num_too_long > 1 else f"1 {kind} has"
    bound = "that rollout.max_len leaves beside a whole response" if prompts else "of warm_start.tokens_per_step"
    return f"{field}: {have} more than the {limit:,} tokens {bound}, the first in {figures.first_too_long}"


def _table(figures: "dict[str, SourceFigures]") -> Table:
    columns = ("problems", "tokens p50", "p95", "most", "too long", "duplicates")
    table = Table(Column("source", overflow="fold"), *columns)
    for field, of in figures.items():
        numbers = (of.num_problems, *of.tokens, of.num_too_long, of.num_duplicates)
        table.add_row(escape(field), *(f"{number:,}" for number in numbers))
    return table


def _print_counts(title: str, counts: dict[str, int]) -> None:
    """Print the highest counts; there may be as many names as problems."""
    if counts:
        shown = [f"{visible(name)} {number:,}" for name, number in islice(counts.items(), MOST_NAMES)]
        more = [f"and {len(counts) - MOST_NAMES:,} more"] if len(counts) > MOST_NAMES else []
        print_line(f"{title} {', '.join(shown + more)}")
