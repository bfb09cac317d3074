"""The benchmark of rewards in its smallest form: every figure comes, and no output or verdict goes unlooked at."""

import msgspec
import pytest

from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.records import SandboxTier
from laminar_lab.bench.reward import mathematics, sandbox
from laminar_lab.bench.reward.mathematics import make_answers
from laminar_lab.bench.reward.sandbox import make_programs
from tests.bench.figures import figures

NUM_MAKERS = 4


def test_a_sandbox_has_its_figures():
    found = figures("reward", "sandbox", sandbox.rows(programs=25))
    assert all(value > 0 for value in found.values())


async def test_every_kind_of_program_gives_what_is_wanted_and_a_wrong_output_is_no_figure():
    async with SandboxPool(slots=1, require=SandboxTier.NONE) as pool:
        for program in make_programs(NUM_MAKERS):
            await sandbox.check(pool, program)
            with pytest.raises(AssertionError, match="gave SandboxResult"):
                await sandbox.check(pool, msgspec.structs.replace(program, wanted="something else"))


@pytest.mark.slow
def test_what_hangs_is_out_of_time_and_all_others_are_judged_rightly():
    found = figures("reward", "mathematics", mathematics.rows(verifications=200))
    assert all(value > 0 for value in found.values())


def test_programs_and_answers_are_all_different():
    assert len({program.code for program in make_programs(1000)}) == 1000
    answers = make_answers(1000, hang_one_in=100)
    assert len({answer.text for answer in answers}) == 1000
    assert sum(answer.right is None for answer in answers) == 10
