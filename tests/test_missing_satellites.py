"""Without a satellite, its commands, rewards and environments end in one line and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = "configs/quickstart.yaml"
OF_CORE = "reward.use=[mine.py:score]"  # a reward of the core, in place of the config's
COLD = "warm_start=null"
HIDDEN = """
import sys

package = sys.argv.pop(1)

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
from laminar_py.cli import main
main()
"""


def laminar_without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that cannot import a package."""
    return subprocess.run(
        [sys.executable, "-c", HIDDEN, package, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[1],
    )


@pytest.mark.parametrize(
    ("package", "arguments", "said"),
    [
        ("laminar_lab", ["plan", "7B", "--gpus", "8x8xH100"], "laminar plan: laminar_lab cannot be imported"),
        ("laminar_lab", ["report", "runs/quickstart-1"], "laminar report: laminar_lab cannot be imported"),
        ("laminar_lab", ["bench", "learner"], "laminar bench: laminar_lab cannot be imported"),
        ("laminar_lab", ["train", "configs/emulation/repack.yaml"], "rollout.engine.kind=emulated: "),
        ("laminar_contrib", ["train", CONFIG, COLD, "reward.use=[math]"], "reward.use.kind=math: "),
        ("laminar_contrib", ["train", CONFIG], "warm_start.kind=supervised: "),
        ("laminar_contrib", ["train", CONFIG, COLD], "reward.use.kind=exact: "),
        ("laminar_contrib", ["train", CONFIG, COLD, OF_CORE, "tracking.kinds=[wandb]"], "tracking.kinds=wandb: "),
        (
            "laminar_contrib",
            ["train", CONFIG, COLD, OF_CORE, "environment={kind: tools, tools: [calculator]}"],
            "environment.kind=tools: ",
        ),
    ],
)
def test_a_missing_satellite_is_one_line_and_exit_code_2(package, arguments, said):
    done = laminar_without(package, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert said in line
    assert f"{package}" in line


@pytest.mark.parametrize("package", ["laminar_lab", "laminar_contrib"])
def test_the_core_works_without_a_satellite(package):
    assert laminar_without(package, "--help").returncode == 0
    assert laminar_without(package, "train", "--help").returncode == 0
