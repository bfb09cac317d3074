"""Checks of the rewards before a run starts: each task has one, functions load, servers answer.

Functions are loaded in processes of their own, as scorers do, so that no code of a user runs in the controller.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.registry import find_file
from laminar_py.config.reward import FUNCTION, REWARDS, RewardConfig, TermConfig, check_tasks
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.problems import ProblemSet
from laminar_py.data.sources import DataSource
from laminar_py.records.trajectory import DropReason, Prompt
from laminar_py.reward.calls.child import CallSpec, WriteFence
from laminar_py.reward.calls.pool import CallPool
from laminar_py.reward.failures import Trial

SETS = "eval.sets."
MOST = 50_000  # problems of a source that are checked; each takes up to a millisecond
PROGRESS_S = 5.0  # between lines on the progress of the check
log = logging.getLogger(__name__)


def check_rewards(
    reward: RewardConfig,
    problems: Sequence[ProblemSet],
    *,
    fence: WriteFence,
    sandbox: SandboxConfig | None,
    trials: Sequence[Trial] = (),
) -> None:
    """Refuse a reward that cannot score the problems of all files, or raises on all `trials`.

    Raises `ConfigError`. Functions are loaded behind `fence`. `sandbox` is the sandbox of this host for programs
    of the model; None if scorers run on other hosts, which then also have to reach the servers of judges.
    """
    check_problems(reward, problems)
    if sandbox is not None:
        check_terms(reward, sandbox)
    load_functions(reward, fence=fence, trials=trials)


def load_functions(reward: RewardConfig, *, fence: WriteFence, trials: Sequence[Trial] = ()) -> None:
    """Load each function, and each term of a package, in a process behind `fence`, and try it.

    Raises `ConfigError` if one does not load, or raises an error on every trial whose task it scores.
    """
    made = [term for term in _distinct_terms(reward) if REWARDS.get(term.kind).make is not None]
    own = [term for term in made if term.kind not in REWARDS.built_in or term.kind == FUNCTION]
    tried = [[one for one in trials if term in reward.of_task(one.request.task)] for term in own]
    starts = (
        _start_process(term, f"reward-{index}", fence, tried[index], term.timeout_s or reward.timeout_s)
        for index, term in enumerate(own)
    )
    asyncio.run(_wait_for_all(starts))


def check_functions(config: RunConfig) -> None:
    """Raise `ConfigError` if a reward function does not load, or if the file of the loss does not define it."""
    if config.algorithm.objective_file is not None:
        find_file(config.algorithm.objective_file, field="algorithm.objective")
    load_functions(config.reward, fence=WriteFence(str(config.runs), str(config.relay.shm)))


def check_problems(reward: RewardConfig, problems: Sequence[ProblemSet]) -> None:
    """Raise `ConfigError` if a task has no reward, or if a problem lacks a field that its reward needs."""
    tasks: dict[str, str] = {}
    for file in problems:
        for task, first in file.tasks.items() if _set_name(file.source) not in reward.by_set else ():
            tasks.setdefault(task, file.source.place(file.row(first)))
    check_tasks(reward, tasks)
    for file in problems:
        for problem in _sampled_problems(file):
            place, set_name = file.source.place(problem.index), _set_name(file.source)
            check_problem(reward, problem, place=place, set_name=set_name)


def _set_name(source: DataSource) -> str:
    """Return the name of the evaluation set that a file has; "" for a file of training data."""
    return source.field.removeprefix(SETS) if source.field.startswith(SETS) else ""


def check_problem(reward: RewardConfig, problem: Prompt, *, place: str, set_name: str = "") -> None:
    """Raise `ConfigError` if a problem lacks a field that its reward needs.

    `place` names file and line of the problem in the message; `set_name` is its evaluation set, "" for training.
    """
    for term in reward.of_task(problem.task, set_name=set_name):
        with REWARDS.naming_package(term.kind):
            fault = REWARDS.get(term.kind).fault(term, problem)
        if fault is not None:
            raise ConfigError(
                f"{place}: {fault}, which the reward {term.title} needs; fix it, or give its task another reward"
            )


def check_terms(reward: RewardConfig, sandbox: SandboxConfig) -> None:
    """Raise `ConfigError` if a term cannot run on this host, e.g. without its server or its sandbox."""
    for term in _distinct_terms(reward):
        with REWARDS.naming_package(term.kind):
            REWARDS.get(term.kind).check(term, sandbox)


def _distinct_terms(reward: RewardConfig) -> Collection[TermConfig]:
    return {term.model_dump_json(): term for term in reward.terms}.values()


@contextmanager
def log_folder() -> Iterator[Path]:
    """Yield a new folder for the logs of reward functions; delete it afterwards if no log has text."""
    folder = Path(tempfile.mkdtemp(prefix="laminar-"))
    try:
        yield folder
    except ConfigError as error:
        if not _has_text(folder) or str(folder) in str(error):
            raise
        raise ConfigError(f"{error}; for the output of its process, see {folder}") from error
    finally:
        if not _has_text(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _has_text(folder: Path) -> bool:
    return any(path.is_file() and path.stat().st_size for path in folder.rglob("*"))


def _sampled_problems(problems: ProblemSet) -> Iterator[Prompt]:
    """Yield at most `MOST` problems, spread over all, and log the progress now and then."""
    logged_s, source = time.monotonic(), problems.source
    number = min(len(problems), MOST)
    for index in range(number):
        yield problems.without_prompt(index * len(problems) // number)
        if time.monotonic() - logged_s > PROGRESS_S:
            logged_s = time.monotonic()
            log.warning("checking problems of %s=%s: %d of %d", source.field, source.path, index + 1, number)


async def _wait_for_all(starts: Iterable[Coroutine[object, object, None]]) -> None:
    """Wait until all terms have loaded; raise the first error."""
    for end in await asyncio.gather(*starts, return_exceptions=True):
        if end is not None:
            raise end


async def _start_process(
    term: TermConfig, name: str, fence: WriteFence, trials: Sequence[Trial], timeout_s: float
) -> None:
    """Load and try a term in a process of its own, which then ends. Raises `ConfigError` with its log folder."""
    with log_folder() as folder:
        spec = CallSpec(term=term.model_dump_json(), timeout_s=timeout_s, folder=str(folder), fence=fence)
        async with CallPool(spec, name=name) as pool:
            await _try(pool, trials, term)
        shutil.rmtree(folder)


async def _try(pool: CallPool, trials: Sequence[Trial], term: TermConfig) -> None:
    """Call a term on trials up to its first value. Raises `ConfigError` if it raises an error on all.

    A late call, or a `TryAgainError`, is no evidence: a service may be down.
    """
    fault = ""
    for trial in trials:
        outcome = await pool.call(trial.request)
        if outcome.failure is not DropReason.REWARD_FAILED or outcome.transient:
            return
        fault = fault or trial.complaint(outcome.detail, title=term.title)
    if fault:
        raise ConfigError(
            f"{fault}; it fails on all {len(trials)} trials, so mend it: `laminar reward try` tries it"
        )
