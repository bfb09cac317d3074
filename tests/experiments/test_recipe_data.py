"""Recipes read rows in the form of the public data sets that they name, and their rewards take them."""

import json
import re

import pytest
import yaml

from laminar_py.config.loading import load_config
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.reward import WriteFence
from laminar_py.runtime.preflight.inputs import read_problems
from laminar_py.runtime.preflight.rewards import check_rewards
from tests.data.templates import TEMPLATES, make_tokenizer_folder
from tests.experiments.test_recipes import RECIPES
from tests.runs.runs import REPO

TESTS = {"inputs": ["1\n"] * 5, "outputs": ["2\n"] * 5}
ROWS = {  # source -> a row as it stands there
    "open-r1/DAPO-Math-17k-Processed": {
        "prompt": "What is $1+1$?",
        "solution": "2",
        "data_source": "math_dapo",
        "source_prompt": [{"role": "user", "content": "Solve: What is $1+1$?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    },
    "HuggingFaceH4/aime_2024": {
        "id": 60,
        "problem": "Find $n$.",
        "solution": "...",
        "answer": "204",
        "year": "2024",
    },
    "math-ai/aime25": {"problem": "Find $b$.", "answer": "70", "id": "0"},
    "data/code/train.jsonl": {"prompt": "Add one.", "tests": TESTS},
    "data/code/heldout.jsonl": {"prompt": "Add 1.", "tests": TESTS},
}
ANSWERS = {"open-r1/DAPO-Math-17k-Processed": "2", "HuggingFaceH4/aime_2024": "204", "math-ai/aime25": "70"}
ORIGINAL = {  # of BytedTsinghua-SIA/DAPO-Math-17k
    "prompt": [{"role": "user", "content": "Solve ... What is $1+1$?"}],
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "data_source": "math_dapo",
}


def stored(source, folder, row):
    """The source with its one row in a file."""
    path = folder / f"{source.path.replace('/', '-')}.jsonl"
    path.write_text(json.dumps(row))
    return source.model_copy(update={"path": str(path), "split": "train", "subset": None})


def read(config, folder, rows):
    """Problems of a recipe, checked as before a run, with a model that has a chat template."""
    train = tuple(stored(source, folder, rows[source.path]) for source in config.data.train)
    sets = {name: stored(source, folder, rows[source.path]) for name, source in config.eval.sets.items()}
    data, evaluation = (
        config.data.model_copy(update={"train": train}),
        config.eval.model_copy(update={"sets": sets}),
    )
    model = make_tokenizer_folder(folder / "model", TEMPLATES["chatml"].text)
    encoder = PromptEncoder(load_tokenizer(model), model, data.chat)
    problems = read_problems(config.model_copy(update={"data": data, "eval": evaluation}), encoder, limited=False)
    fence = WriteFence(runs=str(folder), shm=str(folder))
    check_rewards(config.reward, problems.all, fence=fence, sandbox=None)
    return problems


@pytest.mark.parametrize("name", [name for name in RECIPES if "smollm2" not in name])  # which makes its own rows
def test_rows_of_the_sets_that_a_recipe_names_become_chats(name, tmp_path):
    config = load_config(REPO / "experiments" / name, [])
    problems = read(config, tmp_path, ROWS)
    for (problem,) in problems.all:
        assert f"<|im_start|>system\n{config.data.chat.system.strip()}<|im_end|>" in problem.text
        assert problem.text.endswith("<|im_start|>assistant\n")
    answers = [problem.answer for (problem,) in problems.all]
    sources = [*config.data.train, *config.eval.sets.values()]
    assert answers == [ANSWERS.get(source.path, "") for source in sources]


def test_the_original_of_dapo_is_read_with_the_columns_of_the_readme(tmp_path):
    readme = (REPO / "experiments/math_long_cot/README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", readme, re.M | re.S)
    override = json.dumps(yaml.safe_load(block)["data"]["train"])
    config = load_config(REPO / "experiments/math_long_cot/7b_8gpu.yaml", [f"data.train={override}"])
    problems = read(config, tmp_path, ROWS | {"BytedTsinghua-SIA/DAPO-Math-17k": ORIGINAL})
    ((problem,),) = problems.train
    assert problem.answer == "2"
    assert "<|im_start|>user\nSolve ... What is $1+1$?<|im_end|>" in problem.text
