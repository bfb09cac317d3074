"""Lists and texts from the record of a run."""

import shutil
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from laminar_lab.audit.queries import Filters, count, listing
from laminar_lab.audit.samples import SampleOrder, list_samples, read_sample, read_samples
from laminar_lab.audit.stories import ReplicaSpan
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import segments_path
from laminar_py.ledger.segments.writer import segments_in
from laminar_py.records.columns import token_values
from laminar_py.records.events import Dropped, Ready, Restamped
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind, Status
from tests.ledger.runs import begin, checkpoint, consume, open_ledger, store
from tests.samples.runs import (
    HOSTILE,
    begin_sample,
    encode,
    end_sample,
    evaluated,
    grow_sample,
    logprobs_of,
    make_model,
    write_config,
    write_sample,
)

ORDERS = [order for order in SampleOrder if order is not SampleOrder.CONTRAST]


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def run(tmp_path, model):
    write_config(tmp_path / "run", model)
    return tmp_path / "run"


async def a_run(run, model):
    """Four groups of a prompt or two, an evaluation, one dropped while it ran, one under way, one that waits."""
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(0, 1))
        for index, rewards in enumerate([(0, 1, 0.5), (1, 1), (0.25, 0)]):
            for sample, reward in enumerate(rewards):
                ids = encode(model, "4" * (3 * index + sample + 1))
                write_sample(ledger, f"g{index}.{sample}", ids, reward=reward, problem=f"p{index % 2}")
        write_sample(ledger, "e0-aime.0", encode(model, "x"), problem="aime/a", kind=Kind.EVAL)
        evaluated(ledger, "e0-aime.0")
        ledger.append_all(consume(1, 1, "g0.0", "g0.1", staleness=2))
        ledger.append(Dropped("g1.0", DropReason.STALE, "too old"))
        for sample, text in enumerate(["half a wor", "under"]):
            begin_sample(ledger, f"g3.{sample}", problem="p0")
            grow_sample(ledger, f"g3.{sample}", encode(model, text))
        ledger.append(Dropped("g3.0", DropReason.GROUP_DEADLINE))
        begin_sample(ledger, "g3.2", problem="p0")


@pytest.mark.parametrize(
    "filters",
    [
        Filters(),
        Filters(prompt="p0"),
        Filters(step="1"),
        Filters(reward="<1", kind=Kind.TRAIN),
        Filters(length=">=3"),
        Filters(reason=DropReason.STALE),
        Filters(group="g2"),
        Filters(eval_set="aime"),
        Filters(eval_set="other"),
        Filters(status=Status.RUNNING),
    ],
)
async def test_lists_have_what_the_audit_lists(run, model, filters):
    await a_run(run, model)
    audited = {row.id: row for row in listing(run, filters)}
    found = list_samples(run, filters)
    assert [row.id for row in found] == list(audited)[::-1]
    assert len(found) == count(run, filters)
    for row in found:
        assert row == audited[row.id]
    assert {row.id for row in list_samples(run, filters, order=SampleOrder.CONTRAST)} <= audited.keys()


@pytest.mark.parametrize("order", ORDERS)
async def test_an_order_is_kept_and_ends_at_the_limit(run, model, order):
    await a_run(run, model)
    keys = {
        SampleOrder.NEWEST: lambda row: -row.number,
        SampleOrder.OLDEST: lambda row: row.number,
        SampleOrder.BEST: lambda row: -row.reward,
        SampleOrder.WORST: lambda row: row.reward,
        SampleOrder.LONGEST: lambda row: -row.length,
        SampleOrder.SHORTEST: lambda row: row.length,
        SampleOrder.STALEST: lambda row: -row.staleness,
    }
    found = list_samples(run, Filters(), order=order)
    assert found
    assert found == sorted(found, key=keys[order])
    assert list_samples(run, Filters(), order=order, limit=2) == found[:2]


async def test_contrasts_are_the_best_and_the_worst_of_each_group_the_newest_first(run, model):
    await a_run(run, model)
    found = list_samples(run, Filters(kind=Kind.TRAIN), order=SampleOrder.CONTRAST)
    assert [row.id for row in found] == ["g2.0", "g2.1", "g1.0", "g0.1", "g0.0"]


async def test_a_sample_has_its_text_its_reward_and_what_stands_beside_it(run, model):
    ids = encode(model, "4 is é😀")
    steps = token_values(np.arange(len(ids), dtype=np.float32))
    async with open_ledger(run) as ledger:
        begin(ledger)
        columns = {"token_rewards": steps}
        write_sample(ledger, "g0.0", ids, prompt="<|im_start|>2+2=", verdict="right", columns=columns)
    found = read_sample(run, "g0.0")
    story = found.story
    assert (found.text, story.prompt, story.answer, story.task) == ("4 is é😀", "<|im_start|>2+2=", "4", "sum")
    assert found.tokens == [*"4 is ", "", "é", "", "", "", "😀"]
    assert (found.record()["ids"], found.ids_only) == (ids.tolist(), "")
    assert found.logprobs == pytest.approx(logprobs_of(ids).tolist())
    assert story.spans == [ReplicaSpan(version=0, replica=0, start=0, end=len(ids))]
    assert [(term.name, term.value, term.elapsed_s, term.text) for term in story.terms] == [
        ("math", 1.0, 0.25, "right")
    ]
    assert found.columns == {"token_rewards": list(map(float, range(len(ids))))}


async def test_siblings_are_the_samples_of_its_group(run, model):
    await a_run(run, model)
    assert [row.id for row in read_sample(run, "g2.1").siblings] == ["g2.0", "g2.1"]


async def test_what_runs_waits_was_dropped_or_evaluated_is_read_as_well(run, model):
    await a_run(run, model)
    read = {one.story.row.id: one for one in read_samples(run, ["g3.0", "g3.1", "g3.2", "e0-aime.0", "g1.0"])}
    assert [one.text for one in read.values()] == ["half a wor", "under", "", "x", "4444"]
    assert read["g3.0"].story.row.drop_reason is DropReason.GROUP_DEADLINE
    assert (read["g3.1"].story.terms, read["g3.2"].story.spans) == ([], [])
    assert [row.id for row in read["e0-aime.0"].siblings] == ["e0-aime.0"]


async def test_a_restamped_sample_has_its_final_spans(run, model):
    ids = encode(model, "made by two versions")
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(0, 1))
        begin_sample(ledger, "g0.0")
        grow_sample(ledger, "g0.0", ids[:5])
        spans = (Span(1, 5, len(ids)),)
        store(ledger, "g0.0", 5, len(ids), spans, ids=ids[5:], logprobs=logprobs_of(ids[5:]))
        ledger.append(Restamped("g0.0", (Span(0, 0, 4), Span(1, 4, len(ids)))))
        end_sample(ledger, "g0.0", ids, [Span(0, 0, 4), Span(1, 4, len(ids))])
        ledger.append(Ready("g0.0", 0.5))
        ledger.append_all(consume(1, 1, "g0.0", staleness=1))
        ledger.append(checkpoint(1, 1))
    live = read_sample(run, "g0.0")
    assert live.text == "made by two versions"
    assert [(span.version, span.start) for span in live.story.spans] == [(0, 0), (1, 4)]


async def test_a_response_that_is_lost_is_no_empty_one_and_costs_no_other(run, model):
    async with open_ledger(run) as ledger:
        begin(ledger)
        write_sample(ledger, "g0.0", encode(model, "gone"), columns={"token_rewards": zeros(4)})
        write_sample(ledger, "g0.1", encode(model, "here"))
    (segment,) = segments_in(segments_path(run))
    segment.write_bytes(b"x" * 60 + segment.read_bytes()[60:])
    gone, here = read_samples(run, ["g0.0", "g0.1"])
    assert (gone.text, gone.tokens, gone.story.spans, gone.columns) == ("", [], [], {})
    assert gone.story.lost.startswith("trajectory=g0.0: its tokens cannot be read (")
    assert (here.text, here.story.lost) == ("here", "")


def zeros(length):
    return token_values(np.zeros(length, np.float32))


@pytest.mark.parametrize("text", HOSTILE)
async def test_text_is_kept_as_it_was_written(run, model, text):
    async with open_ledger(run) as ledger:
        begin(ledger)
        write_sample(ledger, "g0.0", encode(model, text), prompt=text, verdict=text)
    found = read_sample(run, "g0.0")
    assert (found.text, found.story.prompt, found.story.terms[0].text) == (text, text, text)


async def test_without_the_model_tokens_are_ids_and_a_line_says_why(run, model, tmp_path):
    await a_run(run, model)
    moved = shutil.move(model, tmp_path / "moved")
    found = read_sample(run, "g0.0")
    assert found.tokens == [f"{id} " for id in found.story.response.ids]
    assert found.ids_only == f"model.path={model}: no tokenizer.json in it; name a Hugging Face model folder"
    assert read_sample(run, "g0.0", model=moved).text == "4"
    (run / "config.yaml").unlink()
    assert "does not name a model" in read_sample(run, "g0.0").ids_only
    found = read_sample(run, "g0.0", model=moved)
    assert (found.text, found.ids_only) == ("4", "")
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: no tokenizer.json"):
        read_sample(run, "g0.0", model=tmp_path)


async def test_the_evaluation_of_a_checkpoint_has_the_tokenizer_of_its_run(run, model, tmp_path):
    await a_run(run, model)
    evaluation = tmp_path / "eval-run-1"
    write_config(evaluation, tmp_path / "gone")
    (evaluation / "source.json").write_text(f'{{"path": "{run}/checkpoints/step-1-0.0", "step": 1}}')
    async with open_ledger(evaluation) as ledger:
        begin(ledger)
        write_sample(ledger, "e0-aime.0", encode(model, "ok"), kind=Kind.EVAL)
    assert read_sample(evaluation, "e0-aime.0").text == "ok"


async def test_another_tokenizer_in_the_same_folder_is_taken(run, model):
    await a_run(run, model)
    assert read_sample(run, "g0.0").text == "4"
    (model / "tokenizer.json").unlink()
    assert read_sample(run, "g0.0").ids_only


def test_a_run_that_was_killed_reads_as_it_stands(tmp_path):
    command = [sys.executable, "-m", "tests.ledger.crashing_run", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(12):
            process.stdout.readline()
        process.kill()
    assert process.returncode == -signal.SIGKILL
    rows = list_samples(tmp_path, Filters(), limit=10_000)
    assert len(rows) == count(tmp_path, Filters())
    assert Counter(row.status for row in rows)[Status.CONSUMED] >= 48
    for found in read_samples(tmp_path, [row.id for row in rows]):
        assert len(found.logprobs) == len(found.tokens) == found.story.row.length
