"""A run with an environment: processes of it, a replica and everything die; no answered turn is taken again."""

import signal
import sqlite3
from collections import Counter
from contextlib import closing

import msgspec
import psutil

from laminar_lab.audit.verify import verify
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_py.records.metrics import TurnFigures
from laminar_py.records.spans import decode_spans, num_sampled, num_turns
from tests.runs.runs import TrainProcess

LIMIT = 3  # tokens of the second turn
ENVIRONMENT = '''
import json
import time
import uuid

from laminar_py.environment.protocol import End, Observation


class Counts:
    """Ends after three turns; it can be saved. Each turn writes down the one before it, whose answer was heard."""

    def __init__(self, log):
        self.log, self.name, self.turn, self.taken = log, uuid.uuid4().hex, 0, ""

    def reset(self, problem):
        return Observation()

    def step(self, action):
        time.sleep(0.02)
        if self.turn:
            with open(self.log, "a") as file:
                file.write(f"{self.name} {self.turn} {self.taken}\\n")
        self.turn, self.taken = self.turn + 1, uuid.uuid4().hex
        limit = LIMIT if self.turn == 1 else None
        return End(len(action) / 100) if self.turn == 3 else Observation(f"#{self.turn}", max_tokens=limit)

    def snapshot(self):
        return json.dumps([self.name, self.turn, self.taken]).encode()

    def restore(self, state):
        self.name, self.turn, self.taken = json.loads(state)
'''


class Told(msgspec.Struct):
    """What a summary has of turns."""

    turns: TurnFigures


def settings(folder):
    (folder / "counts.py").write_text(ENVIRONMENT.replace("LIMIT", str(LIMIT)))
    arguments = f"arguments: {{log: {folder / 'answered'}}}"
    return (
        f"environment={{path: {folder / 'counts.py'}:Counts, workers: 2, {arguments}}}",
        "reward.use=environment",
        "warm_start.steps=60",  # so that turns end
        "rollout.sampling.max_new_tokens=240",
        "steps=8",
    )


def pid_of(run, part):
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        (body,) = ledger.execute(
            "SELECT body FROM event WHERE kind = 'partstarted' AND subject = ? ORDER BY seq DESC", (part,)
        ).fetchone()
    return msgspec.json.decode(body)["pid"]


def second_turn(spans):
    """Tokens of the second turn of a response; 0 without one."""
    words = [span for span in spans if span.turn_limit is not None]
    start = words[0].end if words else spans[-1].end
    return (
        next((span.start for span in spans if span.start > start and span.version is None), spans[-1].end) - start
    )


def test_environments_and_all_else_die_and_every_answered_turn_counts_once(tmp_path):
    given = settings(tmp_path)
    with TrainProcess(tmp_path, *given) as train:
        train.wait_for_step(1)
        for part in ("environment-0", "environment-1", "replica-0"):
            psutil.Process(pid_of(train.run, part)).send_signal(signal.SIGKILL)
        train.wait_for_step(4)
        for process in reversed(train.family()):
            process.kill()
        train.finish()
    with TrainProcess(tmp_path, *given, resume=True) as train:
        train.end_with(0)
    assert not verify(train.run)
    taken = set((tmp_path / "answered").read_text().splitlines())
    answered = Counter(line.rpartition(" ")[0] for line in taken)
    assert max(answered.values()) == 1
    with closing(sqlite3.connect(train.run / "ledger.sqlite")) as ledger:
        dropped = dict(ledger.execute("SELECT drop_reason, count(*) FROM trajectory GROUP BY drop_reason"))
        rows = ledger.execute("SELECT spans, length, reward FROM trajectory WHERE status = 'consumed'").fetchall()
    assert not any(reason and reason.startswith("environment") for reason in dropped), dropped
    turns = [num_turns(decode_spans(spans)) for spans, _, _ in rows]
    assert max(turns) == 3
    assert all(num_sampled(decode_spans(spans)) <= length for spans, length, _ in rows)
    seconds = [second_turn(decode_spans(spans)) for spans, _, _ in rows]
    assert max(seconds) == LIMIT, "its environment has limited it"
    assert any(reward > 0 for _, _, reward in rows)
    told = msgspec.json.decode((train.run / "summary.json").read_bytes(), type=Told).turns
    assert 1.0 < told.mean <= 3.0
    assert told.environment_p95_s >= told.environment_p50_s > 0.02
    step = RunReport(read_snapshot(train.run)).diagnosis.mean_step
    assert step.times.environment_s > 0.0
    assert step.away > 0.0
