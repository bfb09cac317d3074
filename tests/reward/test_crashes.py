"""Crashes below a scorer: whatever is killed while it scores, rewards are those of an undisturbed one."""

import asyncio
import json
from contextlib import suppress

import psutil

from laminar_py.records.scoring import Unscored
from tests.reward.requests import make_request
from tests.reward.test_scorer import PATIENCE_S, scorer_of, with_ids

FUNCTION = "def score(request):\n    return len(request.response) % 3\n"
TESTS = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}
PROGRAM = "import time\ntime.sleep(0.1)\nprint(2 * int(input()){})\n#{}"
RESPONSES = 32
EACH = 3  # scores after which one process is killed


def below():
    return psutil.Process().children(recursive=True)


async def scores_of(folder, *, kills):
    """Value of each response; with `kills` one process after the other is killed, as scores come in."""
    before, found, killed = {process.pid for process in below()}, {}, 0
    (folder / "mine.py").write_text(FUNCTION)
    function = {"kind": "function", "path": f"{folder}/mine.py:score", "weight": 0.1}
    async with scorer_of(folder, {"use": ["code", function]}) as scorer:
        for index in range(RESPONSES):
            fields = json.dumps({"tests": TESTS}).encode()
            program = PROGRAM.format(" + 1" * (index % 8 == 7), index)
            request = with_ids(make_request(program, index=index, fields_json=fields))
            scorer.submit_responses([Unscored(request=request)])
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < RESPONSES:
                found |= {
                    score.trajectory_id: (score.value, score.detail) for score in await scorer.next_scores(1.0)
                }
                victims = [process for process in below() if process.pid not in before]
                if kills and victims and killed < len(found) // EACH:
                    with suppress(psutil.NoSuchProcess):  # a program that has just ended
                        victims[-1 - killed % len(victims)].kill()
                    killed += 1
    return found, killed


async def test_rewards_are_the_same_though_processes_of_sandboxes_and_functions_are_killed(tmp_path):
    calm, _ = await scores_of(tmp_path, kills=False)
    disturbed, killed = await scores_of(tmp_path, kills=True)
    assert killed > 3
    assert disturbed == calm
