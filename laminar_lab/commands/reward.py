"""`laminar reward try`: compute the rewards of samples without a run.

`laminar rescore` calls `score_and_print` too. Exit codes: 0 every reward is as expected, 1 a reward failed or
differs from the expected or recorded one, 2 bad input.
"""

import asyncio
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError
from laminar_py.config.reward import RewardConfig, server_name
from laminar_py.records.scoring import PoolAddresses, Score, ServerAddress

if TYPE_CHECKING:
    from laminar_py.config.run import RunConfig
    from laminar_py.records.scoring import ScoringRequest
    from laminar_py.reward import LaunchedServers

app = typer.Typer(no_args_is_help=True, help="Try a reward on samples, before a run.")

PRINTED = 20  # lines of a kind
PROGRESS_S = 5.0  # seconds between two lines of progress
COUNTED = 10  # different rewards that are counted one by one; for more, print mean, least, median and most

Overrides = Annotated[list[str] | None, typer.Argument(help=r"Settings, e.g. 'reward.use=\[math]'")]


@app.callback()
def rewards() -> None:
    """Try rewards before GPUs are paid for."""


@app.command("try", epilog="Example: laminar reward try experiments/math_long_cot/7b_8gpu.yaml samples.jsonl")
def try_samples(
    config: Annotated[Path, typer.Argument(help="YAML file of a run; its reward and tokenizer are used")],
    samples: Annotated[
        Path,
        typer.Argument(help="JSONL with `response`, fields of its problem, and the expected `reward`, if known"),
    ],
    overrides: Overrides = None,
) -> None:
    """Score samples; print failures, rewards that differ from the expected ones, and times."""
    from laminar_lab.reward_samples import SampleLine, SampleToScore, make_sample
    from laminar_py.config import load_config
    from laminar_py.data import load_tokenizer, other_fields, read_records, source_at, text_of
    from laminar_py.runtime.preflight import prepare

    settings = load_config(config, overrides or [])
    if not samples.is_file():
        raise ConfigError(f"samples={samples}: no such file; name a JSONL file, a line for each response")
    prepare(settings)
    tokenizer = load_tokenizer(settings.model.path)
    source = source_at(samples, "samples")
    made: list[SampleToScore] = [
        make_sample(
            source.place(row),
            line,
            other_fields(text, SampleLine.__struct_encode_fields__),
            answer=text_of(text, "answer", line.answer),
            encode=tokenizer.encode,
            decode=tokenizer.decode,
            end=tokenizer.eos_ids[0],
        )
        for row, line, text in read_records(source, SampleLine)
    ]
    by_place = {sample.place: sample for sample in made}
    score_and_print(
        settings,
        (sample.request for sample in made),
        lambda score: by_place[score.trajectory_id].disagreement(score),
    )


def _checked(reward: RewardConfig, requests: Iterable["ScoringRequest"]) -> Iterator["ScoringRequest"]:
    """Yield requests. Raises `ConfigError` at the first whose problem lacks a field that its reward needs."""
    from laminar_py.records.trajectory import Prompt
    from laminar_py.runtime.preflight import check_problem

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


def score_and_print(
    settings: "RunConfig",
    requests: Iterable["ScoringRequest"],
    difference: Callable[[Score], str | None],
    *,
    failures: bool = True,
) -> None:
    """Score all requests and print the result. Exit code 1 where a request failed or `difference` returned a line.

    With `failures` False a failed reward counts only if `difference` says so.
    """
    from laminar_py.runtime.preflight import check_terms, log_folder

    check_terms(settings.reward, settings.sandbox)
    tally = ScoreTally()
    failed: list[str] = []
    differing: list[str] = []
    tasks: set[str] = set()

    def with_tasks() -> Iterator["ScoringRequest"]:
        for request in _checked(settings.reward, requests):
            tasks.add(request.task)
            yield request

    def record(score: Score) -> None:
        tally.add(score)
        if failures and score.failure:
            failed.append(f"{score.trajectory_id}: {score.failure}: {score.detail}")
        if (line := difference(score)) is not None:
            differing.append(line)

    with log_folder() as logs:
        elapsed_s = asyncio.run(_score(settings, with_tasks(), record, logs))
    for table in tally.tables():
        console.print(table)
    _print_lines("failed", failed)
    _print_lines("differ", differing)
    for task in sorted(settings.reward.by_task.keys() - tasks):
        print_line(f"reward.by_task.{task}: none of these responses has this task", style="yellow")
    if logs.exists():
        print_line(f"output of the rewards: {logs}")
    print_line(f"{tally.num_scored} scored, {tally.num_failed} failed, {len(differing)} disagree")
    p50, p95 = tally.rewards.p50_p95_ms
    number = tally.num_scored + tally.num_failed
    print_line(
        f"{number} response{'s' * (number != 1)}, p50 {p50} ms, p95 {p95} ms, {number / elapsed_s:.0f} a second"
    )
    if differing or failed:
        raise typer.Exit(1)


async def _score(
    settings: "RunConfig", requests: Iterable["ScoringRequest"], record: Callable[[Score], None], logs: Path
) -> float:
    """Score requests, pass each score to `record`, print progress on standard error, and return the seconds."""
    from laminar_lab.reward_samples import score_all
    from laminar_py.data import load_tokenizer
    from laminar_py.reward import Scorer, WriteFence

    async with (
        open_pools(settings.reward, logs) as launched,
        Scorer(
            settings.reward,
            sandbox=settings.sandbox,
            columns=settings.algorithm.scored_columns,
            decode=load_tokenizer(settings.model.path).decode,
            folder=logs,
            name="reward",
            fence=WriteFence(str(settings.runs), str(settings.relay.shm)),
            launched=launched,
        ) as scorer,
    ):
        began_s = printed_s = time.monotonic()
        number = 0
        async for score in score_all(scorer, requests):
            record(score)
            number += 1
            if time.monotonic() - printed_s > PROGRESS_S:
                printed_s = time.monotonic()
                print(f"{number} response{'s' * (number != 1)} so far", file=sys.stderr)
        return time.monotonic() - began_s


@asynccontextmanager
async def open_pools(reward: RewardConfig, logs: Path) -> AsyncIterator["LaunchedServers"]:
    """Launch one server of each pool on GPUs of its own, and end them. Raises `ConfigError` if one does not
    start."""
    from laminar_py.engines.sglang import SGLangServer, check_pool, pool_server
    from laminar_py.records.engine import EngineLostError
    from laminar_py.reward import LaunchedServers

    up: dict[str, list[ServerAddress]] = {}
    first_gpu = 0
    async with AsyncExitStack() as stack:
        for pool, settings in reward.servers.items():
            check_pool(reward, pool)
            print_line(f"starting reward.servers.{pool}")
            log = logs / f"sglang-{server_name(pool, 0)}.log"
            spec = pool_server(pool, settings, log, first_gpu=first_gpu)
            try:
                server = await stack.enter_async_context(SGLangServer(spec))
            except EngineLostError as error:
                raise ConfigError(f"reward.servers.{pool}: {error}") from None
            up[pool] = [ServerAddress(server.url, server.api_key)]
            first_gpu += settings.gpus
        launched = LaunchedServers()
        launched.update(PoolAddresses(1, up))
        yield launched


def _print_lines(kind: str, lines: list[str]) -> None:
    for line in lines[:PRINTED]:
        print_line(f"{kind}: {line}", style="red")
    if len(lines) > PRINTED:
        print_line(f"and {len(lines) - PRINTED} more {kind}")


@dataclass(slots=True)
class Numbers:
    """Values and seconds of one term or of the reward, e.g. `Numbers(array("d", [1.0]), array("d", [0.2]))`."""

    values: "array[float]" = field(default_factory=lambda: array("d"))  # [responses]
    seconds: "array[float]" = field(default_factory=lambda: array("d"))  # cached values have none

    def add(self, value: float, elapsed_s: float) -> None:
        """Add a value, and its seconds if it was computed and not cached."""
        self.values.append(value)
        if elapsed_s > 0:
            self.seconds.append(elapsed_s)

    @property
    def p50_p95_ms(self) -> tuple[str, str]:
        """Milliseconds, e.g. `("1.2", "8.0")`, or "-" if no value was computed."""
        import numpy as np

        if not self.seconds:
            return "-", "-"
        p50, p95 = np.percentile(self.seconds, [50, 95])
        return f"{1e3 * p50:.1f}", f"{1e3 * p95:.1f}"


class ScoreTally:
    """Counts scores without keeping responses; `tables` shows the result."""

    def __init__(self) -> None:
        self.rewards = Numbers()
        self.num_failed = 0
        self._terms = defaultdict[str, Numbers](Numbers)

    @property
    def num_scored(self) -> int:
        """Number of responses with a value."""
        return len(self.rewards.values)

    def add(self, score: Score) -> None:
        """Count a score."""
        if score.value is None:
            self.num_failed += 1
            return
        self.rewards.add(score.value, score.elapsed_s)
        for term in score.terms:
            self._terms[term.name].add(term.value, term.elapsed_s)

    def tables(self) -> Iterator[Table]:
        """Tables of the rewards (how often each was given, or their spread) and of the terms, where there are
        any."""
        import numpy as np

        values = self.rewards.values
        counts = Counter(f"{value:g}" for value in values)
        if values and len(counts) <= COUNTED:
            yield _table(("reward", "responses"), [(value, str(count)) for value, count in counts.most_common()])
        elif values:
            spread = (np.mean(values), min(values), np.median(values), max(values))
            yield _table(("reward: mean", "min", "p50", "max"), [tuple(f"{number:g}" for number in spread)])
        if self._terms:
            rows: list[tuple[str, ...]] = [
                (name, f"{np.mean(term.values):g}", *term.p50_p95_ms) for name, term in sorted(self._terms.items())
            ]
            yield _table(("term", "mean", "p50 ms", "p95 ms"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(*head)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table
