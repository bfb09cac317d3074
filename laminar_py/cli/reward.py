"""`laminar reward try` and `laminar rescore`: rewards without a GPU, of samples and of what is on record.

Exit codes: 0 all as it should be, 1 a reward failed or is another than the one wanted or recorded, 2 bad input.
"""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from laminar_py.cli.lines import console, say
from laminar_py.config.section import ConfigError

if TYPE_CHECKING:
    from laminar_py.config.reward import RewardConfig
    from laminar_py.config.run import RunConfig
    from laminar_py.records.scoring import Score, ScoringRequest

reward = typer.Typer(no_args_is_help=True, help="Rewards before a run.")

PRINTED = 20  # lines of a kind

Overrides = Annotated[list[str] | None, typer.Argument(help="Settings, e.g. reward.use=[math]")]


@reward.callback()
def rewards() -> None:
    """Try rewards before GPUs are paid for."""


@reward.command("try", epilog="Example: laminar reward try configs/math_7b_cluster.yaml samples.jsonl")
def try_samples(
    config: Annotated[Path, typer.Argument(help="YAML of a run, whose reward and tokenizer are used")],
    samples: Annotated[
        Path, typer.Argument(help="JSONL: `response`, fields of its problem, and `reward` where it is known")
    ],
    overrides: Overrides = None,
) -> None:
    """Score samples and say what failed, what disagrees with the reward wanted, and how long it took."""
    from laminar_py.config.loading import load_config
    from laminar_py.data.jsonl import JsonlFile, other_fields, read_jsonl
    from laminar_py.data.tokenizer import load_tokenizer
    from laminar_py.preflight.inputs import prepare
    from laminar_py.reward.samples import Sample, SampleLine, make_sample

    settings = load_config(config, overrides or [])
    prepare(settings)
    tokenizer = load_tokenizer(settings.model.path)
    source = JsonlFile(samples, "samples")
    made: list[Sample] = [
        make_sample(
            source.place(row),
            line,
            other_fields(text, SampleLine),
            encode=tokenizer.encode,
            end=tokenizer.eos_ids[0],
        )
        for row, line, text in read_jsonl(source, SampleLine)
    ]
    wanted = {sample.place: sample for sample in made}
    _judge(
        settings,
        (sample.request for sample in made),
        lambda score: wanted[score.trajectory_id].disagreement(score),
    )


def rescore(
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    overrides: Overrides = None,
) -> None:
    """Compute every reward of a run again from its record, and say which are others than they were."""
    from laminar_py.audit.rescoring import RecordedScore, recorded_scores
    from laminar_py.config.loading import load_config
    from laminar_py.ledger.run_folder import RunFolder

    settings = load_config(RunFolder(run).config, overrides or [])
    known: dict[str, RecordedScore] = {}

    def requests() -> Iterable["ScoringRequest"]:
        for recorded in recorded_scores(run):
            known[recorded.request.trajectory_id] = recorded
            yield recorded.request

    _judge(
        settings,
        requests(),
        lambda score: known.pop(score.trajectory_id).difference(score, settings.reward),
        failures=False,
    )


def _checked(reward: "RewardConfig", requests: Iterable["ScoringRequest"]) -> Iterator["ScoringRequest"]:
    """Requests whose problems have what their reward needs; the first other one is a `ConfigError`."""
    from laminar_py.preflight.rewards import check_problem
    from laminar_py.records.trajectory import Prompt

    for request in requests:
        place = request.trajectory_id
        if not reward.of_task(request.task):
            raise ConfigError(f"{place}: task {request.task!r} has no reward; add it to reward.by_task")
        problem = Prompt(
            id=place,
            index=0,
            text=request.prompt,
            ids=request.prompt_ids,
            answer=request.answer,
            task=request.task,
            fields_json=request.fields_json,
        )
        check_problem(reward, problem, place=place)
        yield request


def _judge(
    settings: "RunConfig",
    requests: Iterable["ScoringRequest"],
    differs: Callable[["Score"], str | None],
    *,
    failures: bool = True,
) -> None:
    """Have all scored and print what came out; exit code 1 where something failed or differs."""
    from laminar_py.preflight.rewards import check_answers

    check_answers(settings.reward)
    scores: list[Score] = []
    lines: list[str] = []
    elapsed_s = 0.0

    async def work() -> None:
        nonlocal elapsed_s
        from laminar_py.cli.pools import open_pools
        from laminar_py.data.tokenizer import load_tokenizer
        from laminar_py.reward.samples import score_all
        from laminar_py.reward.scorer import Scorer

        decode, columns = load_tokenizer(settings.model.path).decode, settings.algorithm.scored_columns
        with tempfile.TemporaryDirectory(prefix="laminar-") as folder:
            async with (
                open_pools(settings.reward, Path(folder)) as launched,
                Scorer(
                    settings.reward,
                    sandbox=settings.sandbox,
                    columns=columns,
                    decode=decode,
                    folder=Path(folder),
                    name="reward",
                    launched=launched,
                ) as scorer,
            ):
                began = time.perf_counter()
                async for score in score_all(scorer, _checked(settings.reward, requests)):
                    scores.append(score)
                    if (line := differs(score)) is not None:
                        lines.append(line)
                elapsed_s = time.perf_counter() - began

    asyncio.run(work())
    _print_scores(scores, elapsed_s)
    failed = [f"{score.trajectory_id}: {score.failure}: {score.detail}" for score in scores if score.failure]
    _print_lines("failed", failed if failures else [])
    _print_lines("differ", lines)
    if lines or (failures and failed):
        raise typer.Exit(1)


def _print_lines(kind: str, lines: list[str]) -> None:
    for line in lines[:PRINTED]:
        say(f"{kind}: {line}", style="red")
    if len(lines) > PRINTED:
        say(f"and {len(lines) - PRINTED} more {kind}")


def _print_scores(scores: list["Score"], elapsed_s: float) -> None:
    import numpy as np

    values = Counter("no value" if score.value is None else f"{score.value:g}" for score in scores)
    table = Table("reward", "responses")
    for value, count in values.most_common(PRINTED):
        table.add_row(value, str(count))
    console.print(table)
    p50, p95 = np.percentile([score.elapsed_s for score in scores], [50, 95]) if scores else (0.0, 0.0)
    rate = len(scores) / elapsed_s
    say(f"{len(scores)} responses, p50 {1e3 * p50:.1f} ms, p95 {1e3 * p95:.1f} ms, {rate:.0f} a second")
