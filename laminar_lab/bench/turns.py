"""Time that we add between an environment's answer and the first token of the next turn.

A run's replica lives in this process and a run's environment process beside it. Trajectories run one after
another. The environment takes no time and notes when it has answered, by `time.monotonic`, which is one clock for
a host. The replica's weights come from a folder, and its reports stay here. Turns have one token, so the first
token of a turn leaves the engine at once. The engine's own time, from the replica's request to the first token, is
subtracted.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from transformers import AutoConfig

from laminar_lab.bench import timed_environment
from laminar_lab.bench.report import Row, log_line, spread
from laminar_lab.bench.workplace import workplace, write_model
from laminar_lab.tiny_models import SPECIAL, tiny_model
from laminar_py.config import RunConfig, parse_config
from laminar_py.config.rollout import OnNewWeights
from laminar_py.engines.local import LocalEngine
from laminar_py.ledger.segments import PayloadReader
from laminar_py.records import Delta, EngineLostError, FinishReason, GenerateRequest, Problem, SamplingParams
from laminar_py.records.codec import encode
from laminar_py.records.host import SystemClock
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import Kind
from laminar_py.records.weights import PulledVersion
from laminar_py.relay import generate_keys, peer_sockets
from laminar_py.rollout import Replica, SegmentStore
from laminar_py.runtime.cluster import LOOPBACK, Part, open_cluster
from laminar_py.runtime.workers import EnvironmentActor, EnvironmentSpec, RemoteEnvironments

ROWS = ("turn_added_ms", "turn_total_ms", "turn_engine_ms")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT, MAX_LEN = 16, 2560  # tokens of a prompt, of a trajectory at most
TURNS, FIRST, WORDS = 16, 64, 16  # of a trajectory, tokens before the first turn and before each other turn
PATIENCE_S = 240.0
QUIET_S = 0.2  # between reports without news
VERSION = 0


def rows(*, repeats: int = 5, count: int = 10) -> list[Row]:
    """Measure `count` trajectories a round, medians over `repeats` rounds; one more round warms all parts up."""
    with workplace() as folder, open_cluster(None):
        rounds = asyncio.run(_measure_rounds(folder, count, repeats=repeats))
    where = f"p50, {count} trajectories of {TURNS} turns behind {PROMPT + FIRST} tokens and more"
    return added_rows("turn", rounds, where)


async def _measure_rounds(folder: Path, count: int, *, repeats: int) -> list[list[tuple[float, float]]]:
    """Run all rounds on one replica; return total and engine seconds of each turn, without the first round."""
    rng, vocab = np.random.default_rng(0), len(SPECIAL) + len(LETTERS)
    rounds: list[list[tuple[float, float]]] = []
    async with BenchReplica(write_inputs(folder), folder / "run", messages=False) as replica:
        for number in range(repeats + 1):
            times = []
            for index in range(count):
                name, prompt = f"turns-{number}.{index}", rng.integers(len(SPECIAL), vocab, PROMPT, dtype=np.int32)
                fields = {"turns": TURNS, "first": FIRST, "words": WORDS, "out": str(folder / name)}
                engine = await replica.run(name, prompt, fields, vocab=vocab, max_tokens=MAX_LEN - PROMPT)
                answered_s = json.loads((folder / name).read_text())
                times += turn_times(answered_s, engine)
            log_line(f"round {number} of {repeats}: {1e3 * median(total for total, _ in times):.2f} ms a turn")
            rounds.append(times)
    return rounds[1:]


def turn_times(answered_s: Sequence[float], engine_s: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return total and engine seconds of a trajectory's turns but the first.

    `answered_s` are the moments of the environment's answers; `engine_s` has the moments of each turn's request to
    the engine and of its first token.
    """
    turns = list(zip(answered_s, engine_s, strict=True))[1:]
    return [(first_s - answered, first_s - asked_s) for answered, (asked_s, first_s) in turns]


def added_rows(name: str, rounds: Sequence[Sequence[tuple[float, float]]], where: str) -> list[Row]:
    """Make the rows of total, engine and added ms from rounds of (total, engine) seconds; p50 of each round."""
    total_ms = [1e3 * median(total for total, _ in times) for times in rounds]
    engine_ms = [1e3 * median(engine for _, engine in times) for times in rounds]
    added_ms = [1e3 * median(total - engine for total, engine in times) for times in rounds]

    def row(kind: str, values: Sequence[float], detail: str = "") -> Row:
        conditions = f"{where}{detail}; median of rounds {spread(values, '.2f')}"
        return Row(f"{name}_{kind}_ms", median(values), "ms", conditions)

    return [
        row("added", added_ms, ", without the engine's own time"),
        row("total", total_ms),
        row("engine", engine_ms, ", from the replica's request to its first token"),
    ]


def write_inputs(folder: Path) -> RunConfig:
    """Write a model of 230,000 parameters; return the config of a run on it."""
    model = folder / "model"
    model.mkdir()
    files = tiny_model(LETTERS, pattern="[a-z]", context=MAX_LEN)
    (model / "config.json").write_text(files["model/config.json"])
    write_model(model, AutoConfig.from_pretrained(model))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text(files[f"model/{name}"])
    environment = {"kind": "class", "path": f"{timed_environment.__file__}:TimedEnvironment", "max_turns": 100}
    return parse_config(
        {
            "name": "turns",
            "steps": 1,
            "model": {"path": str(model)},
            "data": {"train": "none.jsonl"},
            "environment": environment,
            "rollout": {"max_batch": 8, "max_len": MAX_LEN, "sampling": {"max_new_tokens": MAX_LEN - PROMPT}},
            "reward": {"use": ["environment"]},
        }
    )


# ---- the replica


class TimedEngine(LocalEngine):
    """The embedded engine; `times` has the moments of each request and of its first token, by trajectory."""

    times: defaultdict[str, list[tuple[float, float]]]

    def follow(self, request: GenerateRequest, on_delta: Callable[[Delta | EngineLostError], None]) -> None:
        """See `PushEngine.follow`."""
        asked_s, is_first = time.monotonic(), True

        def timed(news: Delta | EngineLostError) -> None:
            nonlocal is_first
            if is_first and isinstance(news, Delta) and len(news.ids):
                is_first = False
                self.times[request.rid].append((asked_s, time.monotonic()))
            on_delta(news)

        super().follow(request, timed)


class FolderWeights:
    """`WeightSource` of one folder, without any newer version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def wait_newer(self, version: int) -> int:
        """See `WeightSource.wait_newer`."""
        if version >= VERSION:
            await asyncio.Event().wait()
        return VERSION

    async def pull(self, version: int | None = None, *, base: int = -1) -> PulledVersion:
        """See `WeightSource.pull`."""
        return PulledVersion(VERSION, str(self._folder), "")


class BenchReplica:
    """A replica in this process and a process of environments, within an open cluster; prompts are `messages`, or
    text.
    """

    def __init__(self, config: RunConfig, run: Path, *, messages: bool) -> None:
        (run / "logs").mkdir(parents=True)
        self._config, self._run, self._messages = config, run, messages
        self._environments = Part("environment-0", EnvironmentActor, concurrency=4, timeout_s=PATIENCE_S)

    async def __aenter__(self) -> "BenchReplica":
        config, rollout, keys = self._config, self._config.rollout, generate_keys()
        spec = EnvironmentSpec(
            config=config.model_dump_json(),
            run_dir=str(self._run),
            index=0,
            messages=self._messages,
            host=LOOPBACK,
            keys=keys,
        )
        await self._environments.call("start", encode(spec))
        self._engine = TimedEngine(
            config.model.path,
            max_batch=rollout.max_batch,
            max_len=rollout.max_len,
            kv_capacity=rollout.kv_tokens,
        )
        self._engine.times = defaultdict(list)
        await self._engine.start()
        segments, self._wire = self._run / "segments", peer_sockets(keys)
        self._remote = RemoteEnvironments(self._run, 1, self._wire, "replica-0")
        self._replica = Replica(
            0,
            engine=self._engine,
            weights=FolderWeights(config.model.path),
            store=SegmentStore(segments, "replica-0", PayloadReader(segments)),
            clock=SystemClock(),
            on_new_weights=OnNewWeights.DRAIN,
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=rollout.partial_interval_s,
            environments=self._remote,
        )
        self._running = asyncio.create_task(self._replica.run(), name="replica")
        while not (await self._replica.next_report(QUIET_S)).admissible:
            pass
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        await self._engine.close()
        self._remote.close()
        self._wire.close()

    async def run(
        self, name: str, prompt: np.ndarray, fields: Mapping[str, object], *, vocab: int, max_tokens: int
    ) -> list[tuple[float, float]]:
        """Run a trajectory to its end, with turns of one token. Returns the engine's times of each turn."""
        sampling = SamplingParams(max_new_tokens=max_tokens, stop_ids=tuple(range(vocab)))
        problem = Problem(prompt="", trajectory_id=name, fields=dict(fields))
        assignment = Assignment(
            trajectory_id=name,
            epoch=0,
            group_id=name,
            kind=Kind.TRAIN,
            prompt_ids=prompt,
            sampling=sampling,
            problem=problem,
        )
        self._replica.start_assignments([assignment])
        while True:
            for progress in (await self._replica.next_report(QUIET_S)).progress:
                assert progress.failure is None, f"{name}: {progress.detail}"
                if progress.finish_reason is not None:
                    assert progress.finish_reason is FinishReason.STOP, f"{name}: {progress.finish_reason}"
                    return self._engine.times.pop(name)
