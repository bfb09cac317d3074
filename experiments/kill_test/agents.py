"""The kill test with agents: agents, their launcher and endpoint, replicas, learner and controller die.

`python experiments/kill_test/agents.py [--kills 40] [--seed 0] [--only VICTIM ...] [--json] [key=value ...]`
trains the run of agents.yaml. At the end every law must hold, and no answer that an agent has heard may have
changed. Otherwise the exit code is 1.
"""

import random
from collections import Counter
from pathlib import Path

import psutil
from noted import LOG
from run import CONTROLLER, EVERYTHING, Run, kill_and_prove, kill_process, make_arguments, run_settings

from laminar_lab.audit.queries import accounting
from laminar_lab.bench.report import Row

AGENT, LAUNCHER = "agent", "launcher"
PARTS = ("environment-0", "environment-1", "replica-0", "replica-1", "learner-0")
VICTIMS = (AGENT, LAUNCHER, *PARTS, CONTROLLER, EVERYTHING)


class AgentRun(Run):
    """A run whose agents can be killed too."""

    def kill(self, victim: str) -> bool:
        """Kill a victim now; return False if it is not there at this moment."""
        if victim not in (AGENT, LAUNCHER):
            return super().kill(victim)
        try:
            launcher = next(
                one
                for one in psutil.Process(self._pid("environment-0")).children()
                if "laminar_contrib.agents.launcher" in one.cmdline()
            )
            chosen = launcher if victim == LAUNCHER else random.choice(launcher.children())
        except (psutil.NoSuchProcess, StopIteration, IndexError):
            return False
        return kill_process(chosen.pid)


def agent_rows(run: Run) -> tuple[list[Row], bool]:
    """Make the rows on the answers that agents heard; also return whether none changed."""
    lines = [line.split("\t") for line in LOG.read_text().splitlines()]
    heard: dict[tuple[str, str], set[str]] = {}
    for name, turn, answer in lines:
        if turn != "error":
            heard.setdefault((name, turn), set()).add(answer)
    errors = Counter(value for _, what, value in lines if what == "error")
    changed = sum(len(answers) > 1 for answers in heard.values())
    dropped = accounting(run.folder).train.dropped
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "none"
    rows = [
        Row("answers", len(heard), "turns that agents heard", f"{len(lines)} times, with restarted agents"),
        Row("answers_changed", changed, "turns heard with two answers", "by the agents' own file"),
        Row("agent_errors", errors.total(), "errors that reached agents", str(dict(errors))),
        Row("trajectories_dropped", sum(dropped.values()), "trajectories", reasons),
    ]
    return rows, not changed


def main() -> None:
    """Kill, resume, prove."""
    args = make_arguments(__doc__, victims=VICTIMS, steps=400).parse_args()
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    run = AgentRun(Path(__file__).with_name("agents.yaml"), run_settings(args))
    kill_and_prove(run, args, name="kill_test", judge=agent_rows)


if __name__ == "__main__":
    main()
