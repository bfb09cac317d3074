"""`laminar samples` and the text in `laminar audit RUN show`, as they are typed."""

import json
import re

import pytest
from typer.testing import CliRunner

from laminar_lab.audit.samples import read_sample
from laminar_py.cli import app
from laminar_py.config.section import ConfigError
from tests.ledger.runs import begin, open_ledger
from tests.samples.runs import HOSTILE, encode, evaluated, make_model, write_config, write_sample
from tests.samples.test_reading import a_run


def laminar(*words):
    """What the command prints; its `ConfigError` is raised."""
    done = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "80"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def run(tmp_path):
    write_config(tmp_path / "run", make_model(tmp_path / "model"))
    return tmp_path / "run"


async def write_texts(run, *texts):
    """A run with a group for each text, which is its response, its prompt and its verdict."""
    async with open_ledger(run) as ledger:
        begin(ledger)
        for index, text in enumerate(texts):
            ids = encode(run.parent / "model", text)
            write_sample(ledger, f"g{index}.0", ids, prompt=text, verdict=text, problem=f"p{index}")


def shown(output):
    """Ids of the samples that are shown."""
    return re.findall(r"^(\S+): (?:reward|no reward)", output, re.MULTILINE)


async def test_without_options_the_best_and_worst_of_the_newest_groups_of_training_are_shown(run):
    await a_run(run, run.parent / "model")
    output = laminar("samples", run)
    assert shown(output) == ["g2.0", "g2.1", "g1.0", "g0.1", "g0.0"]
    assert "\n  44444444\n" in output
    assert output.splitlines()[-1].startswith("5 of 11 trajectories; ")


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["--group", "g2"], ["g2.1", "g2.0"]),
        (["--prompt", "p1", "--order", "longest"], ["g1.1", "g1.0"]),
        (["--set", "aime"], ["e0-aime.0"]),
        (["--status", "running"], ["g3.1"]),
        (["--reward", ">=1", "--kind", "train", "--limit", "2"], ["g1.1", "g1.0"]),
        (["--order", "worst", "--limit", "1"], ["g2.1"]),
        (["--reason", "stale"], ["g1.0"]),
        (["g0.2", "g3.2"], ["g0.2", "g3.2"]),
        (["--group", "g99"], []),
    ],
)
async def test_conditions_orders_and_ids_choose(run, words, ids):
    await a_run(run, run.parent / "model")
    assert shown(laminar("samples", run, *words)) == ids
    lines = laminar("samples", run, *words, "--json").splitlines()
    assert [json.loads(line)["row"]["id"] for line in lines] == ids


async def test_an_evaluation_alone_is_shown_without_options(run):
    async with open_ledger(run) as ledger:
        begin(ledger)
        write_sample(ledger, "e0-aime.0", encode(run.parent / "model", "ok"), kind="eval")
        evaluated(ledger, "e0-aime.0")
    assert shown(laminar("samples", run)) == ["e0-aime.0"]


async def test_a_line_of_json_is_a_whole_sample_in_ascii(run):
    await write_texts(run, *HOSTILE)
    lines = laminar("samples", run, "--json").splitlines()
    assert all(line.isascii() and line.isprintable() for line in lines)
    found = [json.loads(line) for line in lines]
    assert found == [read_sample(run, one["row"]["id"]).record() for one in found]
    assert {"".join(one["tokens"]) for one in found} == set(HOSTILE)


@pytest.mark.parametrize("words", [["samples"], ["audit"]])
@pytest.mark.parametrize("text", HOSTILE)
async def test_hostile_text_reaches_the_terminal_as_text(run, words, text):
    await write_texts(run, text)
    output = laminar("samples", run, "--full") if words == ["samples"] else laminar("audit", run, "show", "g0.0")
    assert all(one.isprintable() or one == "\n" for one in output)
    assert text.split("\n")[0].encode("unicode_escape") in output.encode("unicode_escape").replace(b"\\\\", b"\\")


async def test_a_line_of_a_megabyte_and_32k_tokens_are_cut_unless_all_is_asked_for(run):
    long = encode(run.parent / "model", "x" * 2**15)
    await write_texts(run, "y" * 10**6)
    async with open_ledger(run) as ledger:
        begin(ledger, incarnation=2, versions=(1,))
        write_sample(ledger, "g7.0", long, problem="p7")
    output = laminar("samples", run)
    assert max(map(len, output.splitlines())) < 2000
    assert output.count(f"{10**6 - 2000:,} characters left out; --full shows them") == 3, "prompt, text, verdict"
    assert f"{2**15 - 2000:,} characters left out" in output
    assert "x" * 2**15 in laminar("samples", run, "g7.0", "--full", "--colour", "logprob")
    assert "y" * 10**6 in laminar("audit", run, "show", "g0.0")


async def test_a_run_without_its_model_says_so_in_one_line(run):
    await write_texts(run, "4", "5")
    (run.parent / "model" / "tokenizer.json").unlink()
    first, *_ = laminar("samples", run).splitlines()
    assert first.startswith("tokens are shown as ids: model.path=")
    assert "tokens are shown as ids: model.path=" in laminar("audit", run, "show", "g0.0")


async def test_the_story_ends_with_prompt_text_and_verdict(run):
    await write_texts(run, "two\nlines")
    *_, asked, one, two, made_by, text, more, term, said, last = laminar("audit", run, "show", "g0.0").splitlines()
    assert (asked, made_by) == ("prompt p0 of sum, answer '4':", "response: version 0, replica 0")
    assert (one, two) == (text, more) == (said, last) == ("  two", "  lines")
    assert term == "math 1 in 0.250 s, says '4'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["g9.9"], "trajectory=g9.9: not in "),
        (["--reward", "high"], "reward=high: not a comparison"),
        (["g0.0", "--kind", "train"], "g0.0: ids and conditions exclude each other; leave one of them out"),
        (["--model", "nowhere"], "model.path=nowhere: no tokenizer.json in it"),
    ],
)
async def test_a_bad_question_is_one_line(run, words, message):
    await write_texts(run, "4")
    with pytest.raises(ConfigError, match=re.escape(message)) as complaint:
        laminar("samples", run, *words)
    assert "\n" not in str(complaint.value)
