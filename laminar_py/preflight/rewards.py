"""Looks at the rewards of a run before it starts: every task has one, and every function can be loaded.

Functions are loaded in processes of their own, as scorers do, so that none of a user's code runs in the
controller.
"""

import asyncio
import tempfile
from collections.abc import Iterable
from pathlib import Path

from laminar_py.config.reward import FUNCTION, REWARDS, RewardConfig, TermConfig, check_tasks
from laminar_py.config.sandbox import SandboxConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.jsonl import JsonlFile
from laminar_py.records.trajectory import Prompt
from laminar_py.reward.calls.pool import CallPool
from laminar_py.sandbox.pool import SandboxPool
from laminar_py.sandbox.records import SandboxTier


def check_rewards(
    reward: RewardConfig, problems: Iterable[tuple[JsonlFile, list[Prompt]]], *, sandbox: SandboxConfig | None
) -> None:
    """Refuse a reward that cannot be given; `problems` are those of each file. Raises `ConfigError`.

    `sandbox` is what programs of the model would run in here; None where scorers run elsewhere.
    """
    files = list(problems)
    tasks: dict[str, str] = {}
    for source, prompts in files:
        for prompt in prompts:
            tasks.setdefault(prompt.task, source.place(prompt.index))
    check_tasks(reward, tasks)
    terms = {term.model_dump_json(): term for term in reward.terms}
    for source, prompts in files:
        _check_problems(reward, source, prompts)
    if sandbox is not None and any(REWARDS.get(term.kind).runs_programs for term in terms.values()):
        asyncio.run(_open(sandbox))
    made = [term for term in terms.values() if REWARDS.get(term.kind).make is not None]
    asyncio.run(_load([term for term in made if term.kind not in REWARDS.built_in or term.kind == FUNCTION]))


def _check_problems(reward: RewardConfig, source: JsonlFile, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        for term in reward.of_task(prompt.task):
            with REWARDS.blaming(term.kind):
                fault = REWARDS.get(term.kind).fault(term, prompt)
            if fault is not None:
                raise ConfigError(f"{source.place(prompt.index)}: {fault}, which the reward {term.title} needs")


async def _open(sandbox: SandboxConfig) -> None:
    """Open a sandbox once."""
    async with SandboxPool(slots=1, require=SandboxTier(sandbox.require.value)):
        return


async def _load(terms: list[TermConfig]) -> None:
    """Start the process of each once. What a function prints at its import is its own business."""
    with tempfile.TemporaryDirectory(prefix="laminar-") as folder:
        async with asyncio.TaskGroup() as tasks:
            for index, term in enumerate(terms):
                tasks.create_task(_start(term, Path(folder), f"reward-{index}"))


async def _start(term: TermConfig, folder: Path, name: str) -> None:
    async with CallPool(term.model_dump_json(), name=name, timeout_s=1.0, folder=folder):
        return
