"""The launcher of agents: what an agent starts ends with it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from laminar_contrib.agents import launcher, runner
from laminar_contrib.agents.runner import AgentRunner
from laminar_py.environment.protocol import Problem

HEAD = """
import json, os, signal, subprocess, sys, time

def escape():
    "Start a process of a session of its own, whose parent has ended."
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    with open("escaped", "a") as file:
        file.write(f"{os.getpid()}\\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    time.sleep(1000)
    os._exit(0)

def escapes(count):
    for _ in range(count):
        escape()
    while not os.path.exists("escaped") or len(open("escaped").read().split()) < count:
        time.sleep(0.01)
    os.rename("escaped", "pids")

"""


class Started:
    """An agent of a file below a runner."""

    def __init__(self, folder, agent, *, is_function=False, keep_folders=True):
        (folder / "agent.py").write_text(HEAD + agent)
        program = {"command": [sys.executable, str(folder / "agent.py")], "function": ""}
        if is_function:
            program = {"command": [], "function": f"{folder / 'agent.py'}:run"}
        self.folder = folder / "agents"
        self.runner = AgentRunner(**program, url="", folder=self.folder, model=folder, keep_folders=keep_folders)
        self.faults = asyncio.Queue()

    async def start(self, name="t"):
        problem = Problem(prompt="", answer="", trajectory_id=name)
        return await self.runner.start(problem, key="", exited=self.faults.put_nowait)

    async def pids(self, name="t"):
        path = self.folder / name / "pids"
        async with asyncio.timeout(30):
            while not path.exists():  # noqa: ASYNC110 - the agent is another process
                await asyncio.sleep(0.01)
        return [int(pid) for pid in path.read_text().split()]


def runs(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def gone(*pids):
    async with asyncio.timeout(20):
        while any(map(runs, pids)):  # noqa: ASYNC110 - they are other processes
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_function", [False, True])
async def test_processes_of_sessions_of_their_own_end_with_the_agent_that_ends(tmp_path, is_function):
    agent = "def run(problem):\n    escapes(3)\n" if is_function else "escapes(3)\n"
    started = Started(tmp_path, agent, is_function=is_function)
    try:
        await started.start()
        assert await started.faults.get() == ""
        pids = await started.pids()
        assert len(pids) == 3
        assert not any(map(runs, pids)), "they have ended before the agent's end is reported"
    finally:
        await started.runner.close()


async def test_they_end_with_an_agent_that_is_ended_and_others_keep_running(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_S", 0.05)
    started = Started(tmp_path, "escapes(2)\ntime.sleep(1000)\n")
    try:
        end, end_other = await started.start("t"), await started.start("u")
        pids, others = await started.pids("t"), await started.pids("u")
        await end()
        assert not any(map(runs, pids))
        assert all(map(runs, others))
        await end_other()
        assert not any(map(runs, others))
    finally:
        await started.runner.close()


async def test_folders_of_the_oldest_agents_are_deleted_but_not_of_one_that_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "KEPT", 2)
    started = Started(tmp_path, "time.sleep(1000 * os.getcwd().endswith('a'))\n", keep_folders=False)
    try:
        ends = []  # an agent runs until its end is forgotten
        for name in "abcd":
            end = await started.start(name)
            if name == "a":
                ends.append(end)
            else:
                await started.faults.get()
                await end()
                del end
        assert sorted(path.name for path in started.folder.iterdir() if path.is_dir()) == ["a", "d"]
        await ends.pop()()
    finally:
        await started.runner.close()


async def test_they_end_with_the_launcher(tmp_path):
    started = Started(tmp_path, "escapes(2)\ntime.sleep(1000)\n")
    await started.start()
    pids = await started.pids()
    await started.runner.close()
    assert not any(map(runs, pids))


async def test_they_end_with_a_launcher_that_is_killed(tmp_path):
    started = Started(tmp_path, "escapes(2)\ntime.sleep(1000)\n")
    await started.start()
    pids = await started.pids()
    process = await started.runner.ensure_launcher()
    os.kill(process.pid, signal.SIGKILL)
    await gone(*pids)
    await started.runner.close()


async def test_they_end_with_a_guard_that_the_agent_kills(tmp_path):
    started = Started(tmp_path, "escapes(2)\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)\n")
    try:
        await started.start()
        assert "-9" in await started.faults.get()
        assert not any(map(runs, await started.pids()))
    finally:
        await started.runner.close()


async def test_what_the_file_of_a_function_starts_at_its_import_outlives_agents(tmp_path):
    agent = """
helper = subprocess.Popen(["sleep", "1000"])
def run(problem):
    open("pids", "w").write(str(helper.pid))
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    started = Started(tmp_path, agent, is_function=True)
    try:
        await started.start()
        assert str(-signal.SIGSEGV) in await started.faults.get(), "an agent's signal is reported"
        assert all(map(runs, await started.pids()))
    finally:
        await started.runner.close()
    await gone(*await started.pids())


def test_children_are_found_without_a_list_of_the_kernel(monkeypatch):
    child = subprocess.Popen(["sleep", "1000"])
    try:
        listed = launcher._children()
        monkeypatch.setattr(launcher.Path, "glob", without_lists(launcher.Path.glob))
        assert child.pid in launcher._children()
        assert set(launcher._children()) == set(listed)
    finally:
        child.kill()
        child.wait()


def without_lists(glob):
    return lambda path, pattern: () if pattern == "*/children" else glob(path, pattern)
