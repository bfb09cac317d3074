"""docs/extending.md: each of its examples is installed as it stands there, and trains."""

import os
import re
import shlex
import subprocess
import tomllib

import pytest

from tests.runs.runs import LAMINAR, REPO, TrainProcess

PAGE = (REPO / "docs/extending.md").read_text()
EXAMPLES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
MAX_LINES = 60


def blocks(title, kind):
    """Fenced blocks of an example."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", EXAMPLES[title], re.M | re.S)


def install(title, folder):
    """Write its files, and the metadata that an installer leaves beside them; return the names of its modules."""
    web = [text for kind in ("html", "js") for text in blocks(title, kind)]
    modules = {text.partition("\n")[0].removeprefix("# "): text for text in blocks(title, "python")}
    files = modules | {text.partition("\n")[0].strip("<>!-/ "): text for text in web}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for text in blocks(title, "toml"):
        project = tomllib.loads(text)["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project["entry-points"].items()
        lines = [
            [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())] for group, points in groups
        ]
        (info / "entry_points.txt").write_text("\n".join(line for group in lines for line in group))
    return list(modules)


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_short(title):
    texts = [text for kind in ("python", "toml", "html", "js") for text in blocks(title, kind)]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    "titles",
    [["An environment", "A reward", "A kind of reward", "A loss"], ["An algorithm", "An engine", "A planner"]],
    ids=" and ".join,
)
def test_examples_train_for_two_steps_as_the_page_has_them(titles, tmp_path, monkeypatch):
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    settings, configs = ["relay.nodes=1", "steps=2", "learner.checkpoint_every=10", "eval.every_steps=10"], set()
    files: list[str] = []
    for title in titles:
        files += install(title, tmp_path)
        (command,) = blocks(title, "console")
        laminar, train, config, *chosen = shlex.split(command.replace("\\\n", " "))
        assert (laminar, train) == ("laminar", "train")
        configs.add(config)
        for name in files:  # a setting may name a file of the example, or of the one that it goes on from
            chosen = [setting.replace(name, str(tmp_path / name)) for setting in chosen]
        settings += chosen
    (config,) = configs
    with TrainProcess(tmp_path / "runs", *settings, config=REPO / config) as training:
        training.end_with(0)
        assert len((training.run / "metrics.jsonl").read_text().splitlines()) == 2
    if "A reward" in titles:
        draw_page(training.run, tmp_path)


def draw_page(run, folder):
    """Install the example of a page and draw it of a run."""
    install("A page", folder)
    ((_, command, _),) = (shlex.split(text) for text in blocks("A page", "console"))
    out = folder / "page.html"
    told = subprocess.run(
        [LAMINAR, command, str(run), "--out", str(out)], check=True, capture_output=True, text=True, timeout=60
    )
    assert told.stdout == f"{out} has 2 steps\n"
    assert '"title":"Response lengths"' in out.read_text()


def test_every_example_is_tried():
    assert list(EXAMPLES) == [
        "A reward",
        "A kind of reward",
        "An environment",
        "A loss",
        "An algorithm",
        "An engine",
        "A planner",
        "A page",
    ]
