"""`laminar eval`, as a user calls it: a model folder on the sets of a config, killed and gone on with."""

import json
import re
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from laminar_lab.audit.stored import StoredResponses
from laminar_py.config.loading import dump_config, load_config
from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import read_answers
from laminar_py.ledger.rows import trajectory_rows
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.evaluations import set_figures
from tests.learner.builders import make_learner
from tests.runs.runs import LAMINAR, PATIENCE_S, REPO, TrainProcess, quickstart_model

SAMPLES = 16
CONFIG = "configs/quickstart.yaml"
HELDOUT = Path(__file__).with_name("heldout.jsonl")
SMALL_SETTINGS = (
    "rollout.replicas=1",
    "relay.nodes=1",
    "rollout.max_batch=2",  # slow, so that a kill comes before the end
    "rollout.batch_per_replica=6",  # the others wait in the replica, so that it always has two in hand
    "rollout.group_size=2",
    "rollout.sampling.max_new_tokens=96",
)
SETTINGS = (
    *SMALL_SETTINGS,
    f"eval.sets={{told: {{path: {HELDOUT}, samples: {SAMPLES}, temperature: 1}}}}",
)


class EvalProcess(TrainProcess):
    """`laminar eval` of a model folder or a checkpoint, the `number`-th of its folder; ends with its test."""

    def __init__(
        self, folder: Path, model: Path, *, config: Path = REPO / CONFIG, settings=SETTINGS, resume=False, number=1
    ):
        self.folder, self.number = folder, number
        given = [*settings, "name=small", f"runs={folder}", "--config", str(config)]
        command = [LAMINAR, "eval", str(model), *given, *(["--resume"] if resume else [])]
        self.process = subprocess.Popen(
            command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    @property
    def run(self) -> Path:
        return self.folder / f"eval-small-{self.number}"

    def answered(self) -> int:
        """Answers that are on record."""
        if not RunFolder(self.run).has_ledger:
            return 0
        with reading(self.run) as connection:
            query = "SELECT count(*) FROM trajectory WHERE status = 'consumed'"
            return connection.execute(query).fetchone()[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The quickstart's model with weights that were drawn at random."""
    shape = quickstart_model()
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((shape / "tokenizer.json").read_bytes())
    return folder


def responses(run: Path) -> dict[str, bytes]:
    """Token ids of all answers; log-probabilities differ in their last bits where other ones ran beside."""
    with reading(run) as connection:
        stored = StoredResponses(run, connection)
        return {row.id: stored.response(row).ids.tobytes() for row in trajectory_rows(connection)}


def num_begun(run: Path) -> int:
    """Answers of which a part is on record."""
    with reading(run) as connection:
        query = "SELECT count(*) FROM trajectory WHERE status = 'interrupted'"
        return connection.execute(query).fetchone()[0]


@pytest.mark.slow
def test_an_evaluation_that_was_killed_and_stopped_gives_what_an_uninterrupted_one_gives(tmp_path, model):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with EvalProcess(whole, model) as process:
        output = process.end_with(0)
    assert "told: accuracy" in output
    for resume, ends in ((False, signal.SIGKILL), (True, signal.SIGINT)):
        with EvalProcess(killed, model, resume=resume) as process:
            before = process.answered()
            process.wait_until(lambda before=before, process=process: process.answered() > before)
            process.send(ends)
            process.finish()
            assert process.answered() < SAMPLES * 8, "it ended before its end"
    assert num_begun(killed / "eval-small-1") > 0, "Ctrl-C waits for no answer"
    with EvalProcess(killed, model, resume=True) as process:
        process.end_with(0)
    first, second = (json.loads((run / "eval-small-1/summary.json").read_text()) for run in (whole, killed))
    assert first["evaluations"] == second["evaluations"]
    assert first["evaluations"][0]["figures"]["samples"] == SAMPLES
    assert responses(whole / "eval-small-1") == responses(killed / "eval-small-1")
    with reading(killed / "eval-small-1") as connection:
        events = "SELECT count(*) FROM event WHERE kind = 'issued'"
        assert connection.execute(events).fetchone()[0] == SAMPLES * 8, "nothing was issued twice"
        answers = read_answers(connection, "e0-told")
    told = set_figures(answers.values(), samples=SAMPLES, verdicts=["exact"])
    of_record = json.loads(msgspec.json.encode(told))
    assert second["evaluations"][0]["figures"] == of_record, "figures follow from the answers on record"


@pytest.mark.slow
def test_two_evaluations_of_one_checkpoint_at_once_and_a_resume_of_the_older_one_give_the_same(tmp_path, model):
    folder, checkpoint = tmp_path / "runs", tmp_path / "trained/checkpoints/step-0"
    checkpoint.parent.mkdir(parents=True)
    (checkpoint.parents[1] / "config.yaml").write_text(
        dump_config(load_config(REPO / CONFIG, [f"model.path={model}"]))
    )
    make_learner(model).save(checkpoint)
    with EvalProcess(folder, checkpoint) as first:
        first.wait_until((first.run / "source.json").is_file)
        with EvalProcess(folder, checkpoint, number=2) as second:
            first.wait_until(first.answered)
            first.send(signal.SIGKILL)
            first.process.wait(PATIENCE_S)
            assert first.answered() < SAMPLES * 8, "it was killed before its end"
            second.end_with(0)
    with EvalProcess(folder, checkpoint, resume=True) as again:
        again.end_with(0)
    older, newer = (json.loads((run / "summary.json").read_text()) for run in (first.run, second.run))
    assert older["evaluations"] == newer["evaluations"]
    assert older["source"] == {"path": str(checkpoint), "step": 0}
    assert sorted(folder.iterdir()) == [first.run, second.run]
    assert not list(folder.rglob("*.safetensors")), "weights are served, and deleted"


def test_an_evaluation_that_is_stopped_says_how_it_goes_on(tmp_path, model):
    with EvalProcess(tmp_path, model) as process:
        process.wait_until(process.answered)
        process.send(signal.SIGINT)
        output = process.end_with(130)
    assert "--resume continues it" in output


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "source=nowhere: neither a run's folder nor a checkpoint in one"),
        (["MODEL"], "a model folder has no sets; name a config with --config"),
        (
            ["MODEL", "--config", "configs/quickstart.yaml", "--set", "aime"],
            "--set=aime: no such set in eval.sets; name",
        ),
        (
            ["MODEL", "--config", "configs/quickstart.yaml", "eval.sets.heldout.samples=4"],
            "eval.sets.heldout.temperature=0: all samples=4 answers are equal; set it above 0",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_told_in_one_line(model, arguments, line):
    given = [str(model) if argument == "MODEL" else argument for argument in arguments]
    done = subprocess.run(
        [LAMINAR, "eval", *given], cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2, done.stdout
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_example_of_the_page_evaluates_as_it_says(tmp_path, model):
    (block,) = re.findall(r"```yaml\n(.*?)```", (REPO / "docs/evaluation.md").read_text(), re.DOTALL)
    tree = yaml.safe_load((REPO / CONFIG).read_text()) | yaml.safe_load(block)
    small = json.loads(json.dumps(tree).replace("experiments/quickstart/data/heldout.jsonl", str(HELDOUT)))
    config = tmp_path / "evaluation.yaml"
    config.write_text(yaml.safe_dump(small))
    with EvalProcess(tmp_path, model, config=config, settings=SMALL_SETTINGS) as process:
        output = process.end_with(0)
    table = output[output.rindex("problems x samples") :]
    assert re.search(r"problems x samples +8 x 1 +8 x 8", table), output
    assert re.search(r"pass@8 +- +0\.\d{3} \(", table), output
    with reading(process.run) as connection:
        sets = connection.execute("SELECT set_name, samples FROM evaluation").fetchall()
    assert sorted(sets) == [("greedy", 1), ("sampled", 8)]
