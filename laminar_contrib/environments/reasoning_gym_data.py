"""Write problems of a reasoning-gym task as JSONL:

    python -m laminar_contrib.environments.reasoning_gym_data chain_sum --out sums.jsonl --size 1000 min_terms=3

It drops problems whose own answer does not score 1 after a round trip through JSON. Seeds that are less than a
size apart share problems, so choose a seed further away for a held-out set.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from laminar_contrib.environments.reasoning_gym_kind import make_task, require_package
from laminar_py.config import ConfigError

LEAST = 1 - 1e-6  # score of an own answer


def problems(
    task: str, *, size: int, seed: int, config: Mapping[str, JsonValue], evaluates_answers: bool = False
) -> Iterator[dict[str, JsonValue]]:
    """Yield at most `size` rows; a repeated question is left out. Raises `ConfigError` for an unfit task.

    E.g. `{"prompt": "1 + 2 =", "answer": "3", "task": "chain_sum", "entry": {...}, "config": {}}`.
    """
    generator = make_task(task, {**config, "size": size, "seed": seed}, evaluates_answers=evaluates_answers)
    asked: set[str] = set()
    for place in range(size):
        entry = _as_json(task, generator[place])
        if entry["question"] in asked:
            continue
        asked.add(entry["question"])
        score = generator.score_answer(entry["answer"].strip(), entry)  # as it is read from a turn
        if score < LEAST:
            fault = f"scores its own answer to problem {place} {score:g}, as JSON has it"
            raise ConfigError(f"reasoning-gym task {task}: {fault}; choose another task")
        row = {"prompt": entry["question"], "answer": entry["answer"], "task": task}
        yield {**row, "entry": entry, "config": dict(config)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file that the command line asks for; a mistake is one line and exit code 1."""
    parser = argparse.ArgumentParser(description="Write problems of a reasoning-gym task.")
    parser.add_argument("task", help="e.g. chain_sum")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the task, values in JSON")
    parser.add_argument("--size", type=int, required=True, help="problems; repeated problems are left out")
    parser.add_argument("--seed", type=int, default=0, help="problem i follows from seed + i alone")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--evaluates-answers", action="store_true", help="allow a scorer that runs answers as Python code"
    )
    options = parser.parse_intermixed_args(arguments)  # settings may stand anywhere
    try:
        require_package(f"task={options.task}")
        config = dict(map(_setting, options.settings))
        rows = problems(
            options.task,
            size=options.size,
            seed=options.seed,
            config=config,
            evaluates_answers=options.evaluates_answers,
        )
        text = "".join(json.dumps(row) + "\n" for row in rows)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)


def _setting(text: str) -> tuple[str, JsonValue]:
    """Split a setting such as `min_terms=3` into name and value; a value that is not JSON is a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or name in ("size", "seed"):
        raise ConfigError(f"{text}: no setting of a task; write key=value, and --size and --seed as options")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _as_json(task: str, entry: Any) -> dict[str, Any]:
    """Return an entry as it is after a round trip through JSON."""
    try:
        read: dict[str, Any] = json.loads(json.dumps(entry, allow_nan=False))
    except (TypeError, ValueError) as error:
        fault = f"an entry of it has no form in JSON ({error})"
        raise ConfigError(f"reasoning-gym task {task}: {fault}; choose another task") from error
    return read


if __name__ == "__main__":
    main()
