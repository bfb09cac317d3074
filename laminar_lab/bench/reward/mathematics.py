"""Measurement of `laminar bench reward`: verifications a second by the term `math`, with some that hang.

Called as a scorer calls them, in processes that can be ended. Invariant: every verdict is compared with the right
one, and a wrong one ends the benchmark.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from laminar_lab.bench.report import Row
from laminar_lab.bench.reward.answers import KINDS, GivenAnswer, make_answers
from laminar_lab.bench.turns import Tell
from laminar_py.config.reward import REWARDS, TermConfig
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import DropReason, FinishReason
from laminar_py.reward.calls.pool import CallPool
from laminar_py.reward.calls.process import CallSpec

HANG_ONE_IN = 100
TIMEOUT_S = 3.0
THOUGHT = "We simplify both sides, put the roots back and see that only one case remains. " * 20


def rows(*, verifications: int, tell: Tell) -> list[Row]:
    """Rate and latency. Two minutes and a half for 10,000 on two cores, most of it for what hangs."""
    answers = make_answers(verifications, hang_one_in=HANG_ONE_IN)
    term = REWARDS.get("math").settings.model_validate({"kind": "math", "timeout_s": TIMEOUT_S})
    num_hanging = sum(answer.right is None for answer in answers)
    tell(f"{len(answers)} verifications, {num_hanging} of which hang for {TIMEOUT_S:g} s")
    elapsed_s, times_s = asyncio.run(_verify_all(answers, term))
    conditions = (
        f"{len(answers)} different answers, {num_hanging} out of time after {TIMEOUT_S:g} s and the others judged"
        f" rightly; {term.processes} processes, as many at a time, {len(os.sched_getaffinity(0))} cores"
    )
    p50, p99 = median(times_s), quantiles(times_s, n=100)[-1]
    latency = (
        f"from call to outcome, of those that do not hang, one in {len(KINDS)} of which the library judges; p50"
        f" {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, most {max(times_s):.2f} s, with the start of processes"
    )
    return [
        Row("math_verifications_per_s", len(answers) / elapsed_s, "verifications/s", conditions),
        Row("math_p95_ms", 1e3 * quantiles(times_s, n=20)[-1], "ms", f"{latency}; {conditions}"),
    ]


async def _verify_all(answers: list[GivenAnswer], term: TermConfig) -> tuple[float, list[float]]:
    """Seconds in all, and of each that does not hang."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        spec = CallSpec(term=term.model_dump_json(), timeout_s=TIMEOUT_S, folder=Path(folder))
        async with CallPool(spec, name="math", processes=term.processes) as pool:
            todo, times_s = iter(answers), list[float]()
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(pool.at_once):
                    group.create_task(_verify_each(pool, todo, times_s), name="verifications")
            return time.perf_counter() - began, times_s


async def _verify_each(pool: CallPool, todo: Iterator[GivenAnswer], times_s: list[float]) -> None:
    for answer in todo:
        began = time.perf_counter()
        outcome = await pool.call(_request(answer))
        if answer.right is None:
            assert outcome.failure is DropReason.REWARD_TIMEOUT, f"{answer} does not hang: {outcome}"
        else:
            assert outcome.value == answer.right, f"{answer} was judged otherwise: {outcome}"
            times_s.append(time.perf_counter() - began)


def _request(answer: GivenAnswer) -> ScoringRequest:
    nothing = np.zeros(0, np.int32)
    return ScoringRequest(
        trajectory_id=answer.text,
        prompt="",
        response=f"{THOUGHT}\n\nThe answer is $\\boxed{{{answer.text}}}$.",
        answer=answer.reference,
        finish_reason=FinishReason.STOP,
        prompt_ids=nothing,
        response_ids=nothing,
        logprobs=nothing.astype(np.float32),
    )
