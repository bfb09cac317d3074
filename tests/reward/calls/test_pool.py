"""Processes that call reward functions: real ones, which hang, crash and print."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from laminar_py.children import hosted, landlock
from laminar_py.config.section import ConfigError
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.calls.child import CallSpec, WriteFence
from laminar_py.reward.calls.pool import MOST_CRASHES, CallPool
from laminar_py.reward.outcome import Outcome
from tests.reward.requests import make_request, make_requests

PATIENCE_S = 60.0
LATE, FAILED = DropReason.REWARD_TIMEOUT, DropReason.REWARD_FAILED
REWARDS = """
import asyncio, multiprocessing, os, signal, sys, time

def score(request):
    print("looking at", request.response)
    if request.response == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(60)
    while request.response == "hold":
        try:
            time.sleep(60)
        except BaseException:
            continue
    if request.response == "crash":
        os._exit(1)
    if request.response == "env":
        return float(os.environ.get("SECRET", 0)) + float(os.environ.get("SHOWN", 0))
    if request.response == "spy":
        return float(b"SECRET=4" in open(f"/proc/{os.getppid()}/environ", "rb").read())
    if request.response.startswith("write "):
        with open(request.response.split()[1], "w") as file:
            file.write("forged")
        return 1.0
    if request.response == "flood":
        for _ in range(1_000):
            print("x" * 99)
        return 1.0
    if request.response == "lock":
        with multiprocessing.Lock():
            return 1.0
    if request.response == "late":
        time.sleep(0.5)
        return 1.0
    if request.response == "pid":
        return os.getpid()
    if request.response == "read":
        return float(sys.stdin.read() == "")
    return float(request.response)

async def many(request):
    if request.response == "block":
        time.sleep(60)
    if request.response == "crash":
        os._exit(1)
    if request.response == "meet":
        many.met = getattr(many, "met", 0) + 1
        while many.met < 3:
            await asyncio.sleep(0.001)
    return float(request.response) if request.response.isdigit() else 1.0
"""


SPIED = """
import asyncio, json, sys
from pathlib import Path
from laminar_py.reward.calls.pool import CallPool
from laminar_py.reward.calls.child import CallSpec, WriteFence
from tests.reward.requests import make_request
async def main(folder, fenced):
    term = json.dumps({"kind": "function", "path": f"{folder}/mine.py:score"})
    fence = WriteFence(runs=f"{folder}/runs", shm=f"{folder}/shm") if fenced else None
    spec = CallSpec(term=term, timeout_s=30, folder=folder, fence=fence)
    async with CallPool(spec, name="mine") as pool:
        outcome = await pool.call(make_request("spy"))
        print(outcome.value if outcome.value is not None else outcome.detail)
asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def pool_of(
    folder: Path,
    function: str = "score",
    *,
    timeout_s: float = 0.5,
    processes: int = 1,
    term: Mapping[str, object] = {},
    **settings: object,
):
    (folder / "mine.py").write_text(REWARDS)
    settled = json.dumps({"kind": "function", "path": f"{folder}/mine.py:{function}", **term})
    spec = CallSpec(term=settled, timeout_s=timeout_s, folder=str(folder), grace_s=1.5, **settings)
    async with asyncio.timeout(PATIENCE_S), CallPool(spec, name="mine", processes=processes) as pool:
        yield pool


def fence(folder: Path) -> WriteFence:
    return WriteFence(runs=str(folder / "runs"), shm=str(folder / "shm"))


def processes() -> list[psutil.Process]:
    """Those that call functions here."""
    ours = psutil.Process().children(recursive=True)
    return [one for one in ours if "laminar_py.reward.calls.child" in one.cmdline()]


async def outcomes_of(pool: CallPool, *responses: str) -> list[Outcome]:
    return await asyncio.gather(*map(pool.call, make_requests(*responses)))


@pytest.mark.parametrize("kind", ["hang", "hold"])
async def test_a_hang_that_nothing_interrupts_costs_its_own_response(tmp_path, kind):
    async with pool_of(tmp_path) as pool:
        outcomes = await outcomes_of(pool, "1", kind, "2", "3")
    assert [outcome.value for outcome in outcomes] == [1.0, None, 2.0, 3.0]
    assert outcomes[1].failure is LATE
    assert outcomes[1].detail.endswith("(reward.timeout_s, or timeout_s of the term), and it did not stop")


async def test_a_response_that_kills_its_process_is_given_up_after_some_and_the_others_are_scored(tmp_path):
    async with pool_of(tmp_path, timeout_s=30.0) as pool:
        outcomes = await outcomes_of(pool, "1", "crash", "2")
    assert [outcome.value for outcome in outcomes] == [1.0, None, 2.0]
    assert (outcomes[1].failure, outcomes[1].detail) == (
        FAILED,
        f"the process that scored it crashed {MOST_CRASHES} times",
    )


async def test_a_process_that_crashes_without_a_call_is_replaced_by_the_next(tmp_path):
    async with pool_of(tmp_path, timeout_s=30.0) as pool:
        (first,) = await outcomes_of(pool, "pid")
        process = psutil.Process(int(first.value))
        process.kill()
        await asyncio.to_thread(psutil.wait_procs, [process], PATIENCE_S)
        (second,) = await outcomes_of(pool, "pid")
    assert second.value not in (None, first.value)


async def test_a_function_prints_into_the_log_reads_nothing_and_sees_only_named_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "4")
    async with pool_of(tmp_path, timeout_s=30.0, env={"SHOWN": "2"}) as pool:
        outcomes = await outcomes_of(pool, "read", "3", "env")
    assert [outcome.value for outcome in outcomes] == [1.0, 3.0, 2.0]
    assert "looking at read\n" in (tmp_path / "mine.log").read_text()


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
async def test_a_function_may_write_beside_runs_and_weights_and_not_into_them(tmp_path):
    weights, elsewhere = "shm/laminar-mine/v1", ("elsewhere", "runs/notes")
    for folder in ("runs/mine-1", "runs/other-1", weights, *elsewhere):
        (tmp_path / folder).mkdir(parents=True)
    closed = [
        "runs/mine-1/ledger",
        "runs/other-1/new",
        "runs/mine-2",
        f"{weights}/weights",
        "shm/new",
        "/proc/self/comm",
    ]
    for run in ("runs/mine-1", "runs/other-1"):
        (tmp_path / run / "config.yaml").touch()
    for file in (closed[0], closed[3]):
        (tmp_path / file).write_text("true")
    async with pool_of(tmp_path, timeout_s=30.0, fence=fence(tmp_path)) as pool:
        refused = await outcomes_of(pool, *(f"write {tmp_path / path}" for path in closed))
        allowed = await outcomes_of(pool, *(f"write {tmp_path / path}/new" for path in elsewhere))
    assert [outcome.detail.partition(":")[0] for outcome in refused] == ["PermissionError"] * len(closed)
    assert {(tmp_path / file).read_text() for file in (closed[0], closed[3])} == {"true"}
    assert [outcome.value for outcome in allowed] == [1.0, 1.0]


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
@pytest.mark.parametrize("asked", [False, True])
async def test_locks_of_multiprocessing_need_the_setting_that_the_error_names(tmp_path, asked):
    locks = WriteFence(runs=str(tmp_path / "runs"), shm="/dev/shm")
    async with pool_of(tmp_path, timeout_s=30.0, fence=locks, term={"shared_memory": asked}) as pool:
        (outcome,) = await outcomes_of(pool, "lock")
    assert (outcome.value, "see `shared_memory`" in outcome.detail) == ((1.0, False) if asked else (None, True))


async def test_a_log_keeps_the_last_lines_of_a_function_that_prints_much(tmp_path, monkeypatch):
    monkeypatch.setattr(hosted, "LOG_BYTES", 100_000)
    async with pool_of(tmp_path, timeout_s=30.0) as pool:
        assert {outcome.value for outcome in await outcomes_of(pool, *["flood"] * 20)} == {1.0}
        (crashed,) = await outcomes_of(pool, "crash")
    text = (tmp_path / "mine.log").read_text()
    assert crashed.failure == FAILED
    assert len(text) < 100_000 + hosted.OUTPUT_BYTES
    assert text.startswith("(earlier lines were deleted)\n")
    assert text.endswith("looking at crash\n")


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
async def test_a_function_cannot_read_the_environment_of_the_process_that_started_it(tmp_path):
    script = tmp_path / "scorer.py"
    script.write_text(SPIED)
    (tmp_path / "mine.py").write_text(REWARDS)
    env = os.environ | {"PYTHONPATH": os.getcwd(), "SECRET": "4"}
    for fenced in ("", "fenced"):
        command = [sys.executable, str(script), str(tmp_path), fenced]
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
        said = (await asyncio.wait_for(process.communicate(), PATIENCE_S))[0].decode()
        assert said.startswith("PermissionError" if fenced else "1.0"), said


async def test_an_async_function_is_called_for_many_at_once(tmp_path):
    async with pool_of(tmp_path, "many", timeout_s=30.0) as pool:
        assert [outcome.value for outcome in await outcomes_of(pool, "meet", "meet", "meet")] == [1.0] * 3


@pytest.mark.parametrize(("kind", "failure"), [("block", LATE), ("crash", FAILED)])
async def test_of_many_in_a_process_that_is_lost_only_the_guilty_has_no_value(tmp_path, kind, failure):
    async with pool_of(tmp_path, "many") as pool:
        outcomes = await outcomes_of(pool, "1", "3", kind, "2")
        again = await outcomes_of(pool, "4", "5")
        assert len(processes()) == 1, "those that called suspects again are gone"
    assert [outcome.value for outcome in (*outcomes, *again)] == [1.0, 3.0, None, 2.0, 4.0, 5.0]
    assert outcomes[2].failure is failure


async def test_calls_that_wait_while_another_hangs_get_a_process_and_no_more_than_allowed(tmp_path):
    async with pool_of(tmp_path, timeout_s=30.0, processes=2) as pool:
        (first,) = await outcomes_of(pool, "pid")
        hanging = asyncio.create_task(pool.call(make_request("hang")))
        await asyncio.sleep(0)
        others = {outcome.value for outcome in await outcomes_of(pool, *["pid"] * 8)}
        assert len(others) == 1
        assert others != {first.value}
        assert not hanging.done()
        hanging.cancel()
    assert not processes()


async def test_a_call_that_came_first_is_served_first_however_soon_others_follow(tmp_path):
    ended: list[str] = []

    async def call(*texts: str) -> None:
        for text in texts:
            await pool.call(make_request(text))
            ended.append(text)

    async with pool_of(tmp_path, timeout_s=30.0) as pool:
        await asyncio.gather(call("1", "2", "3"), call("4"))
    assert ended == ["1", "4", "2", "3"]


async def test_processes_end_with_the_pool_also_one_that_hangs(tmp_path):
    async with pool_of(tmp_path, timeout_s=30.0) as pool:
        (outcome,) = await outcomes_of(pool, "pid")
        hanging = asyncio.create_task(pool.call(make_request("hang")))
        await asyncio.sleep(0)
    hanging.cancel()
    assert not psutil.pid_exists(int(outcome.value))


async def test_a_start_that_is_called_off_leaves_no_process(tmp_path):
    (tmp_path / "mine.py").write_text(
        "print('importing', flush=True)\nimport time\ntime.sleep(60)\ndef score(request): ...\n"
    )
    term = json.dumps({"kind": "function", "path": f"{tmp_path}/mine.py:score"})
    spec = CallSpec(term=term, timeout_s=1.0, folder=str(tmp_path))
    starting = asyncio.create_task(CallPool(spec, name="mine").__aenter__())
    await asyncio.to_thread(wait_for_text, tmp_path / "mine.log", "importing")
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert not processes()


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.is_file() or text not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_process_ends_with_its_scorer_though_a_call_in_it_hangs(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    script = tmp_path / "scorer.py"
    script.write_text(
        "import asyncio, json, sys\n"
        "from pathlib import Path\n"
        "from laminar_py.reward.calls.pool import CallPool\n"
        "from laminar_py.reward.calls.child import CallSpec\n"
        "from tests.reward.requests import make_request\n"
        "async def main():\n"
        f"    term = json.dumps({{'kind': 'function', 'path': '{tmp_path}/mine.py:score'}})\n"
        f"    spec = CallSpec(term=term, timeout_s=60, folder='{tmp_path}')\n"
        "    async with CallPool(spec, name='mine') as pool:\n"
        "        print(int((await pool.call(make_request('pid'))).value), flush=True)\n"
        "        await pool.call(make_request('hang'))\n"
        "asyncio.run(main())\n"
    )
    pipe = asyncio.subprocess.PIPE
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    scorer = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=pipe, env=env)
    async with asyncio.timeout(PATIENCE_S):
        called = psutil.Process(int(await scorer.stdout.readline()))
        await asyncio.to_thread(wait_for_text, tmp_path / "mine.log", "looking at hang")
        scorer.kill()
        await scorer.wait()
    psutil.wait_procs([called], timeout=PATIENCE_S)
    assert not called.is_running() or called.status() == psutil.STATUS_ZOMBIE


async def test_a_function_that_cannot_be_loaded_is_the_users_fault(tmp_path):
    with pytest.raises(ConfigError, match=r"mine.py defines no function 'nothing'; define it"):
        async with pool_of(tmp_path, "nothing"):
            raise AssertionError("it started")


async def test_a_function_that_was_broken_meanwhile_costs_responses_and_mended_goes_on(tmp_path):
    async with pool_of(tmp_path, timeout_s=30.0) as pool:
        (tmp_path / "mine.py").write_text("(")
        (crashed,) = await outcomes_of(pool, "crash")
        assert "importing" in crashed.detail
        (tmp_path / "mine.py").write_text(REWARDS)
        (again,) = await outcomes_of(pool, "3")
    assert again.value == 3.0


async def test_a_process_that_does_not_start_fails_no_call_while_another_is_there(tmp_path, monkeypatch):
    async with pool_of(tmp_path, processes=3, timeout_s=30.0) as pool:

        async def refuse(*args, **kwargs):
            raise ConfigError("no memory")

        monkeypatch.setattr("laminar_py.reward.calls.pool.RewardWorker.start", refuse)
        outcomes = await asyncio.gather(*(pool.call(request) for request in make_requests("late", "2", "3", "4")))
    assert [outcome.failure for outcome in outcomes] == [None] * 4
