"""`laminar reward try` and `laminar rescore`: rewards without a GPU, of samples and of what is on record.

Exit codes: 0 all as it should be, 1 a reward failed or is another than the one wanted or recorded, 2 bad input.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laminar_py.cli.lines import console, say
from laminar_py.config.section import ConfigError

if TYPE_CHECKING:
    from laminar_py.config.reward import RewardConfig
    from laminar_py.config.run import RunConfig
    from laminar_py.records.scoring import Score, ScoringRequest

reward = typer.Typer(no_args_is_help=True, help="Try a reward on samples, before a run.")

PRINTED = 20  # lines of a kind
TELL_S = 5.0  # between lines on how far it is

Overrides = Annotated[list[str] | None, typer.Argument(help=r"Settings, e.g. 'reward.use=\[math]'")]


@reward.callback()
def rewards() -> None:
    """Try rewards before GPUs are paid for."""


@reward.command("try", epilog="Example: laminar reward try experiments/math_long_cot/7b_8gpu.yaml samples.jsonl")
def try_samples(
    config: Annotated[Path, typer.Argument(help="YAML of a run, whose reward and tokenizer are used")],
    samples: Annotated[
        Path,
        typer.Argument(
            help="JSONL: `response`, fields of its problem, and the `reward` that it should get, if known"
        ),
    ],
    overrides: Overrides = None,
) -> None:
    """Score samples, and say what failed, which rewards are not those that are expected, and how long it took."""
    from laminar_py.config.loading import load_config
    from laminar_py.data.sources import other_fields, read_records, source_at
    from laminar_py.data.tokenizer import load_tokenizer
    from laminar_py.reward.samples import Sample, SampleLine, make_sample
    from laminar_py.runtime.preflight.inputs import prepare

    settings = load_config(config, overrides or [])
    if not samples.is_file():
        raise ConfigError(f"samples={samples}: no such file; name a JSONL file, a line for each response")
    prepare(settings)
    tokenizer = load_tokenizer(settings.model.path)
    source = source_at(samples, "samples")
    made: list[Sample] = [
        make_sample(
            source.place(row),
            line,
            other_fields(text, SampleLine.__struct_encode_fields__),
            encode=tokenizer.encode,
            decode=tokenizer.decode,
            end=tokenizer.eos_ids[0],
        )
        for row, line, text in read_records(source, SampleLine)
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
    """Compute every reward of a run again from its record, and list those that are not as recorded."""
    from laminar_py.config.loading import load_config
    from laminar_py.ledger.audit.rescoring import RecordedScore, recorded_scores
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
    from laminar_py.records.trajectory import Prompt
    from laminar_py.runtime.preflight.rewards import check_problem

    for request in requests:
        place = request.trajectory_id
        if not reward.of_task(request.task, set_name=request.set_name):
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
        check_problem(reward, problem, place=place, set_name=request.set_name)
        yield request


def _judge(
    settings: "RunConfig",
    requests: Iterable["ScoringRequest"],
    differs: Callable[["Score"], str | None],
    *,
    failures: bool = True,
) -> None:
    """Have all scored and print what came out; exit code 1 where something failed or differs."""
    from laminar_py.cli.tally import ScoreTally
    from laminar_py.runtime.preflight.rewards import check_answers, log_folder

    check_answers(settings.reward)
    tally = ScoreTally()
    failed: list[str] = []
    lines: list[str] = []
    tasks: set[str] = set()

    def noting() -> Iterator["ScoringRequest"]:
        for request in _checked(settings.reward, requests):
            tasks.add(request.task)
            yield request

    def take(score: "Score") -> None:
        tally.add(score)
        if failures and score.failure:
            failed.append(f"{score.trajectory_id}: {score.failure}: {score.detail}")
        if (line := differs(score)) is not None:
            lines.append(line)

    with log_folder() as logs:
        elapsed_s = asyncio.run(_score(settings, noting(), take, logs))
    for table in tally.tables():
        console.print(table)
    _print_lines("failed", failed)
    _print_lines("differ", lines)
    for task in sorted(settings.reward.by_task.keys() - tasks):
        say(f"reward.by_task.{task}: none of these responses has this task", style="yellow")
    if logs.exists():
        say(f"what was printed meanwhile: {logs}")
    say(f"{tally.num_scored} scored, {tally.num_failed} failed, {len(lines)} disagree")
    p50, p95 = tally.rewards.p50_p95_ms
    number = tally.num_scored + tally.num_failed
    say(f"{number} response{'s' * (number != 1)}, p50 {p50} ms, p95 {p95} ms, {number / elapsed_s:.0f} a second")
    if lines or failed:
        raise typer.Exit(1)


async def _score(
    settings: "RunConfig", requests: Iterable["ScoringRequest"], take: Callable[["Score"], None], logs: Path
) -> float:
    """Have requests scored, and say on standard error how far it is where that takes a while. Gives seconds."""
    from laminar_py.cli.pools import open_pools
    from laminar_py.data.tokenizer import load_tokenizer
    from laminar_py.reward.samples import score_all
    from laminar_py.reward.scorer import Scorer

    async with (
        open_pools(settings.reward, logs) as launched,
        Scorer(
            settings.reward,
            sandbox=settings.sandbox,
            columns=settings.algorithm.scored_columns,
            decode=load_tokenizer(settings.model.path).decode,
            folder=logs,
            name="reward",
            launched=launched,
        ) as scorer,
    ):
        began_s = told_s = time.monotonic()
        number = 0
        async for score in score_all(scorer, requests):
            take(score)
            number += 1
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                print(f"{number} response{'s' * (number != 1)} so far", file=sys.stderr)
        return time.monotonic() - began_s


def _print_lines(kind: str, lines: list[str]) -> None:
    for line in lines[:PRINTED]:
        say(f"{kind}: {line}", style="red")
    if len(lines) > PRINTED:
        say(f"and {len(lines) - PRINTED} more {kind}")
