"""Verifications a second by the term `math`, with some that hang.

The verifications run in processes that can be ended, as a scorer's do. The benchmark compares every verdict with
the right one, and ends at a wrong one.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from statistics import median, quantiles

import msgspec
import numpy as np

from laminar_lab.bench.report import Row, log_line
from laminar_py.config import TermConfig
from laminar_py.config.reward import REWARDS
from laminar_py.records import DropReason, FinishReason, ScoringRequest
from laminar_py.reward.calls import CallPool, CallSpec


class GivenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    r"""A final answer, e.g. `GivenAnswer(text=r"\frac{2}{8}", reference=r"\frac{1}{4}", right=True)`."""

    text: str
    reference: str
    right: bool | None  # None: the verifier hangs


def make_answers(number: int, *, hang_one_in: int) -> list[GivenAnswer]:
    """Make so many different answers; the last of every `hang_one_in` hangs the verifier."""
    return [
        _hanging(seed)
        if (seed + 1) % hang_one_in == 0
        else _usual(seed // len(KINDS) + 2, KINDS[seed % len(KINDS)])
        for seed in range(number)
    ]


def _usual(seed: int, kind: tuple[str, str, bool]) -> GivenAnswer:
    """Fill the numbers of `seed` into an answer and its reference; other seeds make other answers."""
    text, reference, right = kind
    numbers = {"a": seed, "b": seed + 1, "c": 2 * seed, "d": 6 * seed + 2, "e": 3 * seed + 1, "f": 9 * seed**2 + 9}
    numbers |= {
        "g": seed**2 + 1,
        "h": seed * (seed + 1),
        "m": 1000 * seed,
        "p": 12 * seed,
        "q": 18 * seed,
        "r": 6 * seed,
    }
    for name, value in numbers.items():
        text, reference = (side.replace(f"<{name}>", str(value)) for side in (text, reference))
    return GivenAnswer(text=text, reference=reference, right=right)


def _hanging(seed: int) -> GivenAnswer:
    """Make an answer for which the library first writes out a number of 370 million digits."""
    return GivenAnswer(text=rf"\gcd(9^{{9^9}}, {seed})", reference="7", right=None)


KINDS = (
    (r"\frac{<c>}{<d>}", r"\frac{<a>}{<e>}", True),
    (r"\frac{<a>}{<d>}", r"\frac{<a>}{<e>}", False),
    (r"\sqrt{<f>}", r"3\sqrt{<g>}", True),
    (r"(x+<a>)(x-<b>)", r"x^2-x-<h>", True),
    (r"x^2 - <a>x + 1", r"x^2 + <a>x + 1", False),
    (r"\{<b>, <a>, 0\}", r"\{0, <a>, <b>\}", True),
    (r"x \le <a>", r"(-\infty, <a>]", True),
    (r"[<a>, \infty)", r"(<a>, \infty)", False),
    (r"<a>.5", r"<a>\frac{1}{2}", True),
    (r"\begin{pmatrix}<a> & 1\\0 & <b>\end{pmatrix}", r"\begin{pmatrix}<a> & 1\\0 & <c>\end{pmatrix}", False),
    (r"<a>\text{ km}", r"<m>\text{ m}", True),
    (r"<a>\%", r"\frac{<a>}{100}", True),
    (r"<a>+<b>i", r"<b>i+<a>", True),
    (r"\sin(<a>)\cos(<a>)", r"\frac{1}{2}\sin(<c>)", True),
    (r"<c>\text{ apples}", r"<a>", False),
    (r"\gcd(<p>, <q>)", r"<r>", True),
)


ROWS = ("math_verifications_per_s", "math_p95_ms")
HANG_ONE_IN = 100
TIMEOUT_S = 3.0
THOUGHT = "We simplify both sides, put the roots back and see that only one case remains. " * 20


def rows(*, verifications: int = 10_000) -> list[Row]:
    """Measure rate and latency.

    Two and a half minutes for 10,000 on two cores, most of them in hanging answers.
    """
    answers = make_answers(verifications, hang_one_in=HANG_ONE_IN)
    term = REWARDS.get("math").settings.model_validate({"kind": "math", "timeout_s": TIMEOUT_S})
    num_hanging = sum(answer.right is None for answer in answers)
    log_line(f"{len(answers)} verifications, {num_hanging} of which hang for {TIMEOUT_S:g} s")
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
    """Verify all answers; return the seconds of all, and of each answer that does not hang."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        spec = CallSpec(term=term.model_dump_json(), timeout_s=TIMEOUT_S, folder=folder)
        async with CallPool(spec, name="math", processes=term.processes) as pool:
            todo, times_s = iter(answers), list[float]()
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(pool.concurrency):
                    group.create_task(_verify_each(pool, todo, times_s), name="verifications")
            return time.perf_counter() - began, times_s


async def _verify_each(pool: CallPool, todo: Iterator[GivenAnswer], times_s: list[float]) -> None:
    """Verify answers until none is left, and append the seconds of each answer that does not hang.

    Fails where a verdict is wrong, or where a hanging answer does not time out.
    """
    for answer in todo:
        began = time.perf_counter()
        outcome = await pool.call(
            request(f"{THOUGHT}\n\nThe answer is $\\boxed{{{answer.text}}}$.", answer.reference)
        )
        if answer.right is None:
            assert outcome.failure is DropReason.REWARD_TIMEOUT, f"{answer} does not hang: {outcome}"
        else:
            assert outcome.value == answer.right, f"{answer} was judged otherwise: {outcome}"
            times_s.append(time.perf_counter() - began)


def request(response: str, reference: str) -> ScoringRequest:
    """Make a request to score a response that ended by itself."""
    nothing = np.zeros(0, np.int32)
    return ScoringRequest(
        trajectory_id="t0",
        prompt="",
        response=response,
        answer=reference,
        finish_reason=FinishReason.STOP,
        prompt_ids=nothing,
        response_ids=nothing,
        logprobs=nothing.astype(np.float32),
    )
