"""Problems of programming contests, from public sets, as `train.jsonl` and `heldout.jsonl` of this recipe.

Their tests are text on standard input and output, stored as JSON in a text: `{"inputs": [...], "outputs": [...]}`
(APPS, TACO) or `[{"input": ..., "output": ..., "type": "stdin_stdout"}, ...]` (PrimeIntellect, LiveCodeBench).
Left out are problems that call a function, have fewer than five tests or a too long statement, or occur twice.

    python experiments/code_long_cot/prepare.py [--out FOLDER] [SOURCE ...]     # file, folder, or hub-name:subset
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from laminar_py.config.data import SourceConfig
from laminar_py.data.sources import read_lines

HUB = "agentica-org/DeepCoder-Preview-Dataset"
SOURCES = (f"{HUB}:taco", f"{HUB}:primeintellect")
STATEMENTS = ("problem", "question", "prompt")  # columns, the first that is there
TESTS = ("tests", "input_output", "verification_info")
STDIN = ("stdin", "stdin_stdout")
FEWEST, MOST = 5, 15  # tests of a problem; the longest ones stay
TEST_BYTES = 64 * 1024
STATEMENT_CHARS = 6000  # about 2,000 tokens
HELD_OUT = 64  # one problem in so many, by the digest of its statement

Pair = tuple[str, str]
"""Standard input and output."""


def pairs_of(stored: Any) -> list[Pair] | None:
    """Tests on standard input and output; None where they are of another kind."""
    if isinstance(stored, dict):
        inputs, outputs = stored.get("inputs"), stored.get("outputs")
        if stored.get("fn_name") or not isinstance(inputs, list) or not isinstance(outputs, list):
            return None
        found = [(text_of(given), text_of(wanted)) for given, wanted in zip(inputs, outputs, strict=False)]
    elif isinstance(stored, list) and all(isinstance(test, dict) for test in stored):
        if any(test.get("type", test.get("testtype", "stdin")) not in STDIN for test in stored):
            return None
        found = [(text_of(test.get("input")), text_of(test.get("output"))) for test in stored]
    else:
        return None
    return [(given, wanted) for given, wanted in found if given is not None and wanted is not None]


def text_of(value: Any) -> str | None:
    """Text of a test, which may be a list of its lines."""
    lines = value if isinstance(value, list) else [value]
    return "\n".join(lines) if lines and all(isinstance(line, str) for line in lines) else None


def problem_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """The line of a problem; None where it is left out."""
    statement = next((row[name] for name in STATEMENTS if isinstance(row.get(name), str)), "")
    stored = next((row[name] for name in TESTS if row.get(name)), "null")
    try:
        pairs = pairs_of(json.loads(stored) if isinstance(stored, str) else stored) or []
    except ValueError:
        return None
    small = [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= TEST_BYTES]
    if len(small) < FEWEST or not 0 < len(statement) <= STATEMENT_CHARS:
        return None
    kept = sorted(small, key=lambda pair: -len(pair[0]))[:MOST]
    return {"prompt": statement, "tests": {"inputs": [a for a, _ in kept], "outputs": [b for _, b in kept]}}


def problems(sources: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Lines of all sources, each statement once."""
    seen = set()
    for source in sources:
        path, _, subset = source.partition(":")
        for _, row in read_lines(SourceConfig(path=path, subset=subset or None), "source"):
            problem = problem_of(json.loads(row))
            if problem is not None and problem["prompt"] not in seen:
                seen.add(problem["prompt"])
                yield problem


def is_held_out(problem: dict[str, Any]) -> bool:
    """True for the same problems with any sources."""
    return int.from_bytes(sha256(problem["prompt"].encode()).digest()[:8]) % HELD_OUT == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=SOURCES)
    parser.add_argument("--out", type=Path, default=Path("data/code"))
    arguments = parser.parse_args()
    files = {held: arguments.out / name for held, name in ((False, "train.jsonl"), (True, "heldout.jsonl"))}
    if all(path.is_file() for path in files.values()):
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(files, 0)
    parts = {held: path.with_suffix(".part").open("w") for held, path in files.items()}
    for problem in problems(arguments.sources):
        held = is_held_out(problem)
        counts[held] += 1
        parts[held].write(json.dumps(problem) + "\n")
    for held, path in files.items():
        parts[held].close()
        os.replace(parts[held].name, path)
    print(f"{arguments.out}: {counts[False]} problems to train on, {counts[True]} held out")


if __name__ == "__main__":
    main()
