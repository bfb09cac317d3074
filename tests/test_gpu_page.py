"""docs/gpu.md and the recipes that it names: commands parse, settings exist, links lead somewhere.

Figures of the page are those of the formula, and its symptoms are lines of ours.
"""

import json
import re
import shlex
import subprocess
import tomllib

import pytest
import typer

from laminar_lab.doctor.memory import memory_faults
from laminar_lab.model_shape import kv_token_bytes, read_shape
from laminar_py.cli.command import app
from laminar_py.config.loading import load_config, setting_names
from laminar_py.config.run import RunConfig
from laminar_py.engines.sglang.launch import MIN_VERSION
from tests.experiments.test_recipes import QWEN_7B, QWEN_32B, QWEN_MIXTURE
from tests.runs.runs import REPO

PAGE = (REPO / "docs/gpu.md").read_text()
RECIPES = re.findall(r"\]\(\.\./(experiments/\w+/README\.md)\)", PAGE)
PAGES = {name: (REPO / name).read_text() for name in ("docs/gpu.md", *RECIPES)}
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)]
COMMANDS = [
    line for block in BLOCKS for line in block.replace("\\\n", "").splitlines() if line.startswith("laminar ")
]
SETTINGS = re.findall(
    r"`((?:rollout|learner|relay|cluster|packer|sandbox|reward)\.[a-z_]+(?:\.[a-z_]+)*)", "".join(PAGES.values())
)
ROWS = re.findall(r"^\| (7B|14B|32B|72B|30B-A3B) \| (\d+) GB \| (\d+) \| (\d+|-) \| (.+?) \|$", PAGE, re.M)
SYMPTOMS = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## When it does not work")[2], re.M)
SHAPES = {
    "7B": QWEN_7B,
    "14B": QWEN_32B | {"num_hidden_layers": 48, "intermediate_size": 13824},
    "32B": QWEN_32B,
    "72B": QWEN_32B
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 29568},
    "30B-A3B": QWEN_MIXTURE,
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_shell_block_is_bash(block):
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses_and_its_config_loads(line):
    command = typer.main.get_command(app)
    _, *words = shlex.split(line)
    context = command.get_command(None, words[0]).make_context(words[0], words[1:])
    config = context.params.get("config") or context.params.get("what")
    if config is not None:
        load_config(REPO / config, context.params["overrides"] or [])


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_exists(setting):
    assert setting in setting_names(RunConfig)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages(page):
    for target in re.findall(r"\]\(([^)#]+)", PAGES[page]):
        assert (REPO / page).parent.joinpath(target).is_file(), target


def test_extras_exist():
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for names in re.findall(r"\.\[([a-z,-]+)\]", PAGE) for name in names.split(",")}
    assert named <= set(extras)


def test_the_oldest_sglang_is_the_one_that_is_installed():
    oldest = ".".join(map(str, MIN_VERSION))
    assert f"'sglang=={oldest}'" in PAGE
    assert f'"sglang>={oldest}"' in (REPO / "pyproject.toml").read_text()


def faults(folder, *settings):
    """Complaints about a learner of a model in `folder`."""
    base = REPO / "experiments/math_long_cot/7b_24gpu.yaml"
    changes = [f"model.path={folder}", "learner.recompute=all", *settings]
    return memory_faults(load_config(base, changes), kinds=["learner"])


@pytest.mark.parametrize(("model", "version", "ranks", "adapted", "engines"), ROWS)
def test_what_a_model_needs_is_what_the_formula_says(model, version, ranks, adapted, engines, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[model]))
    shape = read_shape(tmp_path)
    assert round(2 * shape.total / 1e9) == int(version)
    least = [(int(ranks), ()), *([(int(adapted), ("learner.lora.rank=32",))] if adapted != "-" else [])]
    for enough, settings in least:
        assert not faults(tmp_path, f"learner.world_size={enough}", *settings)
        assert enough == 1 or faults(tmp_path, f"learner.world_size={enough - 1}", *settings)
    for gpus, tokens in re.findall(r"(\d+): ([\d,]+)", engines):
        left = 0.85 * 80e9 - 2 * shape.total / int(gpus)
        room = left / kv_token_bytes(shape, int(gpus), width=2)
        assert int(tokens.replace(",", "")) == room // 1000 * 1000


def test_every_model_has_its_row():
    assert [row[0] for row in ROWS] == list(SHAPES)


def messages():
    """The source of all packages, each text in one piece, however it is broken over lines."""
    source = "\n".join(path.read_text() for path in sorted(REPO.glob("laminar_*/**/*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_a_symptom_is_a_line_that_the_code_prints():
    source = messages()
    for symptom in SYMPTOMS:
        assert re.search("[^\n]*?".join(map(re.escape, symptom.split("…"))), source), symptom
    assert len(SYMPTOMS) > 10
