"""Small real runs whose model wrote a given text: byte-level tokenizer, ledger, config."""

import numpy as np
import yaml

from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.records.events import Assigned, Consumed, Ready, Scored
from laminar_py.records.scoring import TermValue
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Kind, Prompt
from tests.data.templates import make_tokenizer_folder
from tests.events import finished, issued
from tests.ledger.runs import digest_of, store, store_columns

HOSTILE = [
    "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "[red]no markup[/red] [link=file:///etc]x[/link] :smile:",
    "<script>alert(1)</script>&amp;</pre>",
    "nul \x00 and \r back\b \x7f",
    "\u202eoverride\u2066 \u2028 \ufeff",
    "日本語 é 👩\u200d🚀\n\n\tan indented line",
]


def make_model(folder):
    """A model folder, as far as texts need one: a tokenizer of bytes."""
    return make_tokenizer_folder(folder, None)


def write_config(run, model, **data):
    """The part of a run's config that texts need."""
    run.mkdir(parents=True, exist_ok=True)
    tree = {"name": "t", "model": {"path": str(model)}, "data": {"train": "t.jsonl", **data}, "later": {"x": 1}}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


def encode(model, text):
    return load_tokenizer(model).encode(text)


def begin_sample(ledger, id, *, prompt="2+2=", problem="p0", answer="4", kind=Kind.TRAIN, index=0):
    """QUEUED, with a prompt of that text."""
    prompted = Prompt(
        id=problem, index=index, text=prompt, ids=np.arange(3, dtype=np.int32), answer=answer, task="sum"
    )
    ledger.store_prompt(prompted)
    ledger.append(issued(id, prompt_id=problem, prompt_index=index, kind=kind))


def grow_sample(ledger, id, ids, *, start=0, version=0, replica=0, epoch=1):
    """RUNNING, with response tokens from `start` on."""
    ledger.append(Assigned(id, replica, epoch, start))
    span = Span(version, start, start + len(ids))
    store(ledger, id, start, span.end, (span,), ids=ids, logprobs=logprobs_of(ids), epoch=epoch)


def logprobs_of(ids):
    return (-ids / 100).astype(np.float32)


def write_sample(ledger, id, ids, *, reward=1.0, verdict="", columns=None, **asked):
    """From issue to READY."""
    begin_sample(ledger, id, **asked)
    grow_sample(ledger, id, ids)
    end_sample(ledger, id, ids, [Span(0, 0, len(ids))], reward=reward, verdict=verdict, columns=columns)
    ledger.append(Ready(id, 0.5))


def end_sample(ledger, id, ids, spans, *, epoch=1, reward=1.0, verdict="", answer="4", columns=None):
    """SCORED."""
    ledger.append(finished(id, spans, epoch=epoch, length=len(ids), digest=digest_of(ledger, id)))
    if columns:
        store_columns(ledger, id, columns)
    terms = [TermValue(name="math", value=reward, elapsed_s=0.25, text=verdict, answer=answer)]
    ledger.append(Scored(trajectory_id=id, reward=reward, elapsed_s=0.3, terms=terms))


def evaluated(ledger, id):
    """CONSUMED, as answers of an evaluation are."""
    ledger.append(Consumed(trajectory_id=id, step=-1, version=0, staleness=0, weight=0.0))
