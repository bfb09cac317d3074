"""Files and pages that tell how to launch: their syntax, and the commands and settings in them."""

import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest
import typer
import yaml

from laminar_lab.launcher.experiment import ExperimentSettings, read_experiment
from laminar_py.cli import app
from tests.launcher.test_launch import wait_until
from tests.runs.runs import REPO

RECIPES = sorted((REPO / "configs/launch").iterdir())
PAGE = (REPO / "docs/launch.md").read_text()


def commands_in(text):
    """Arguments of each `laminar` command in a script, a manifest or a page."""
    text = re.sub(r"\$\(printf %q (\S+)\)", r"\1", text).replace('"', "")
    found = re.findall(r"(?:^|exec ) *(laminar launch [^&|;#\n]*)", text, re.MULTILINE)
    return [shlex.split(one) for one in found]


def test_there_is_a_recipe_for_each_kind_of_cluster():
    assert {path.name for path in RECIPES} == {"kuberay.yaml", "ray_job.sh", "slurm.sh"}
    for path in RECIPES:
        assert f"configs/launch/{path.name}" in PAGE


@pytest.mark.parametrize("path", [*RECIPES, REPO / "docs/launch.md"], ids=lambda path: path.name)
def test_every_laminar_command_can_be_called_like_that(path):
    commands = commands_in(path.read_text())
    assert commands
    group = typer.main.get_command(app)
    for _, name, *arguments in commands:
        group.get_command(None, name).make_context(name, arguments)  # raises for what it does not know


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize("path", [path for path in RECIPES if path.suffix == ".sh"], ids=lambda path: path.name)
def test_a_script_is_one_that_bash_reads(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.stat().st_mode & 0o100


FAKES = {  # what slurm.sh calls, as short scripts; "$FAKES" is their folder
    "scontrol": 'if [ "$1" = show ]; then echo node-a; else echo "$@" >> "$FAKES/requeued"; fi',
    "openssl": "echo token",
    "sleep": "exec /bin/sleep 0.05",
    "ray": 'cat "$FAKES/status"',  # ray status
    "srun": """echo "$@" >> "$FAKES/sruns"
case " $* " in *" --head "*) name=head ;; *) name=workers ;; esac
if [ -e "$FAKES/$name-dies" ]; then echo "no route" >&2; exit 1; fi
nodes=1; [ $name = head ] || nodes=3
for _ in $(seq $nodes); do echo " 1 node_x"; done > "$FAKES/status"
while kill -0 $PPID 2> /dev/null; do /bin/sleep 0.1; done""",
    "laminar": """echo "$@" > "$FAKES/launched"
trap 'exit 130' TERM
for _ in $(seq 600); do [ -e "$FAKES/long" ] || exit 0; /bin/sleep 0.1; done""",
}


def start_slurm_job(folder, *files):
    """slurm.sh on three nodes whose commands are `FAKES`; `files` say what becomes of them."""
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o700)
    for name in files:
        (folder / name).touch()
    job = {"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "node-[a-c]", "SLURM_JOB_ID": "7", "FAKES": str(folder)}
    environment = os.environ | job | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", str(REPO / "configs/launch/slurm.sh"), "experiments/sweep"]
    with (folder / "told").open("w") as told:
        return subprocess.Popen(command, env=environment, stderr=told)


def test_a_slurm_job_starts_ray_once_on_each_node_and_then_the_launcher(tmp_path):
    with start_slurm_job(tmp_path) as job:
        assert job.wait(timeout=60) == 0
    head, others = (tmp_path / "sruns").read_text().splitlines()
    assert "--nodes=1 --ntasks=1 --nodelist=node-a ray start --head" in head
    assert "--nodes=2 --ntasks=2" in others
    assert "--exclude=node-a ray start --address=node-a:6379" in others
    assert (tmp_path / "launched").read_text() == "launch experiments/sweep\n"
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("dies", ["head", "workers"])
def test_a_slurm_job_ends_when_a_ray_start_has_died(tmp_path, dies):
    with start_slurm_job(tmp_path, f"{dies}-dies") as job:
        assert job.wait(timeout=60) == 1
    assert (tmp_path / "told").read_text().splitlines()[-1] == "a ray start has ended; see above"
    assert not (tmp_path / "launched").exists()


def test_a_slurm_job_that_is_to_end_stops_its_runs_and_is_queued_again(tmp_path):
    with start_slurm_job(tmp_path, "long") as job:
        wait_until(job, (tmp_path / "launched").exists)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 130
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_the_manifest_has_what_kuberay_requires():
    manifest = yaml.safe_load((REPO / "configs/launch/kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}, "which the job's submitter has too"
    assert cluster["rayVersion"], "which authOptions ask for"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {"image", "resources", "volumeMounts"} <= set(container)
        assert "rayStartParams" in group


def test_the_page_explains_every_setting_and_its_example_is_an_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(ExperimentSettings.model_fields)
    (tmp_path / "e.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    assert len(read_experiment(tmp_path / "e.yaml").runs) == 12


def test_the_experiment_of_the_repository_is_a_grid_of_twelve(monkeypatch):
    monkeypatch.chdir(REPO)
    experiment = read_experiment(REPO / "experiments/launcher/experiment.yaml")
    assert (len(experiment.variants), len(experiment.runs)) == (4, 12)
    assert {run.config.steps for run in experiment.runs} == {20}
