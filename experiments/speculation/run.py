"""Speculation of the embedded engine: which tokens change, and what is gained; see README.md.

`python experiments/speculation/run.py RUN [RUN ...]` samples with the newest weights of each finished run, for the
prompts on its record: twice each group of a prompt, so that the second time has earlier answers.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from laminar_lab.bench.report import Ratio, Row, log_line, show
from laminar_py.config.loading import load_config
from laminar_py.engines.local.corpus import MOST_BYTES
from laminar_py.engines.local.sampling import NEAR, hash_seeds, uniforms
from laminar_py.engines.local.scheduler import Scheduler
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.ledger.recovery import known_prompts
from laminar_py.records.engine import DraftCounts, GenerateRequest, PauseMode, SamplingParams, sum_drafts
from laminar_py.runtime.preflight.inputs import stop_ids

EPOCHS = 2
TURN = 64  # steps of one engine until the other takes its turn
WARM_UP = 4  # an epoch has as many times the responses of a warm-up
LAMINAR = Path(sys.executable).with_name("laminar")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Weights and requests of a run."""

    name: str
    folder: Path
    prompts: list[np.ndarray]
    sampling: SamplingParams
    group_size: int
    max_len: int

    def requests(self, epoch: int, *, most: int, warm_up: bool = False) -> list[GenerateRequest]:
        """Whole groups, at most so many requests; each has a seed of its own, the same in every call.

        The requests of a `warm_up` have the last prompts.
        """
        places = [(place, sample) for place in range(len(self.prompts)) for sample in range(self.group_size)]
        if warm_up:
            places.reverse()
        return [
            GenerateRequest(
                rid=f"{epoch}.{place}.{sample}",
                group_id=f"{epoch}.{place}",
                prompt_ids=self.prompts[place],
                prefix_ids=np.empty(0, np.int32),
                sampling=msgspec.structs.replace(self.sampling, seed=(epoch * 10**6 + place) * 1000 + sample),
            )
            for place, sample in places[:most]
        ]


@dataclass
class Sampled:
    """Responses by request, and the rate of each epoch."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)  # tokens per CPU second of the thread
    seconds: list[float] = field(default_factory=list)  # of the thread
    drafts: DraftCounts = field(default_factory=DraftCounts)
    corpus_bytes: int = 0  # of the responses to draft from, at most
    progress: int = 0  # tokens so far, with those of the warm-up


def open_task(run: Path, folder: Path, *, prompts: int) -> Task:
    """Export the newest weights of a run to `folder`."""
    subprocess.run([LAMINAR, "export", run, folder], check=True, stdout=subprocess.DEVNULL)
    config = load_config(run / "config.yaml", [])
    return Task(
        name=config.name,
        folder=folder,
        prompts=[prompt.ids for prompt in known_prompts(run, most=prompts)],
        sampling=config.rollout.sampling.params(stop_ids=stop_ids(config)),
        group_size=config.rollout.group_size,
        max_len=config.rollout.max_len,
    )


def sample(
    task: Task, *, slots: int, drafts: bool, most: int, warm_up: int = 0, interrupt_every: int = 0
) -> Iterator[Sampled]:
    """Sample all requests, `slots` at a time, after both epochs of `warm_up` requests that count nowhere.

    Yields what was sampled so far after each `TURN` steps, and all of it in the end.
    Every `interrupt_every` steps the same weights come as a new version, in turn with recomputed and kept caches,
    and one request is aborted and continues.
    """
    scheduler = Scheduler(
        ModelSpec.read(task.folder),
        num_slots=slots,
        max_len=task.max_len,
        kv_capacity=slots * task.max_len,
        stream_interval=1 if interrupt_every else 32,
        drafts=drafts,
    )
    scheduler.load_weights(task.folder, 0)
    found, steps, version, ticket, before = Sampled(), 0, 0, 0, DraftCounts()
    epochs = [task.requests(EPOCHS + epoch, most=warm_up, warm_up=True) for epoch in range(EPOCHS)]
    epochs += [task.requests(epoch, most=most) for epoch in range(EPOCHS)]
    for place, requests in enumerate(epochs):
        if place == EPOCHS:
            found, before = Sampled(progress=found.progress), scheduler.status().drafts
        waiting = requests[::-1]
        by_ticket: dict[int, GenerateRequest] = {}
        num_tokens, seconds, began = 0, 0.0, time.thread_time()
        while waiting or by_ticket:
            while waiting and len(by_ticket) < slots:
                by_ticket[ticket] = waiting.pop()
                scheduler.add_request(ticket, by_ticket[ticket])
                ticket += 1
            scheduler.step()
            steps += 1
            if interrupt_every and not steps % interrupt_every:
                version += 1
                scheduler.abort(min(by_ticket))
                scheduler.pause(PauseMode.RETRACT if version % 2 else PauseMode.IN_PLACE)
                scheduler.load_weights(task.folder, version)
                scheduler.resume()
            for done, delta in scheduler.take_deltas():
                found.tokens.setdefault(delta.rid, []).extend(delta.ids.tolist())
                found.logprobs.setdefault(delta.rid, []).extend(delta.logprobs.tolist())
                num_tokens += len(delta.ids)
                found.progress += len(delta.ids)
                if delta.finish_reason is not None:
                    request = by_ticket.pop(done)
                    if delta.finish_reason == "abort":
                        prefix = np.array(found.tokens[delta.rid], np.int32)
                        waiting.append(msgspec.structs.replace(request, prefix_ids=prefix))
            if not steps % TURN:
                seconds += time.thread_time() - began
                yield found
                began = time.thread_time()
        found.seconds.append(seconds + time.thread_time() - began)
        found.rates.append(num_tokens / max(1e-9, found.seconds[-1]))
        found.corpus_bytes = max(found.corpus_bytes, scheduler.status().corpus_bytes)
    found.drafts = scheduler.status().drafts.since(before)
    yield found


def last(states: Iterator[Sampled]) -> Sampled:
    """Return the last of the states."""
    return deque(states, maxlen=1)[0]


def abreast(sides: Mapping[str, Iterator[Sampled]]) -> dict[str, Sampled]:
    """Return the last state of each side. The side with the fewest tokens so far takes the next turn.

    So both are at the same tokens in the same moments, and what else the machine does changes both rates alike.
    """
    running, found = dict(sides), {name: Sampled() for name in sides}
    while running:
        name = min(running, key=lambda name: found[name].progress)
        state = next(running[name], None)
        if state is None:
            del running[name]
        else:
            found[name] = state
    return found


def differences(one: Sampled, other: Sampled) -> Iterator[tuple[str, int]]:
    """Yield each response that differs, with the place of its first difference."""
    for rid, tokens in one.tokens.items():
        pairs = enumerate(zip(tokens, other.tokens[rid], strict=False))
        place = next((place for place, (a, b) in pairs if a != b), None)
        if place is not None or len(tokens) != len(other.tokens[rid]):
            yield rid, min(len(tokens), len(other.tokens[rid])) if place is None else place


def is_near(task: Task, model: torch.nn.Module, rid: str, one: list[int], other: list[int], place: int) -> bool:
    """Whether two tokens are neighbours, and the number that drew them lies within `NEAR` of their boundary."""
    if place >= min(len(one), len(other)):
        return False
    epoch = int(rid.partition(".")[0])
    request = next(item for item in task.requests(epoch, most=10**9) if item.rid == rid)
    ids = torch.tensor([[*request.prompt_ids.tolist(), *one[:place]]])
    with torch.inference_mode():
        logits = model(ids).logits[0, -1].double() / (request.sampling.temperature or 1.0)
    edges = logits.softmax(-1).cumsum(-1)
    low, high = sorted((one[place], other[place]))
    seed = hash_seeds(np.array([request.sampling.seed], np.uint64))
    number = float(uniforms(seed, np.array([place]))[0])
    between = edges[low:high].numpy()
    return bool((np.abs(between - number) < NEAR).all())


def identity(task: Task, *, most: int) -> list[Row]:
    """Compare the tokens of speculation with plain sampling, and plain sampling with itself in other batches."""
    model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32).eval()
    plain = last(sample(task, slots=16, drafts=False, most=most))
    rows = []
    sides = {
        "speculation": partial(sample, drafts=True, slots=16, most=most),
        "speculation with aborts and new weights": partial(
            sample, drafts=True, slots=16, most=most // 10, interrupt_every=7
        ),
        "other batches": partial(sample, drafts=False, slots=48, most=most),
    }
    for name, side in sides.items():
        found = last(side(task))
        differ = list(differences(found, plain))
        compared = sum(map(len, found.tokens.values()))
        near = [is_near(task, model, rid, found.tokens[rid], plain.tokens[rid], place) for rid, place in differ]
        places = dict(differ)
        gaps = [
            abs(a - b)
            for rid, values in found.logprobs.items()
            for a, b in zip(values[: places.get(rid)], plain.logprobs[rid], strict=False)
        ]
        words = f"{len(found.tokens)} responses, {compared} tokens; {sum(near)} of the first differences excused"
        if counts := found.drafts.verified:
            words = f"{words}; {found.drafts.near} of {counts:,} verified tokens are near a boundary"
        rows.append(Row(f"{task.name}: {name}: first differences", float(len(differ)), "responses", words))
        rows.append(
            Row(f"{task.name}: {name}: largest gap of log-probabilities", 1e6 * max(gaps), "1e-6 nats", words)
        )
    return rows


def speed(task: Task, *, slots: int, rounds: int, most: int) -> list[Row]:
    """Rates of both ways by epoch, with so many sequences at a time, after a warm-up with other prompts."""
    most = min(most, len(task.prompts) * task.group_size * WARM_UP // (WARM_UP + 1))
    epochs: dict[str, list[Sampled]] = {"drafts": [], "plain": []}
    for turn in range(rounds):
        names = list(epochs) if turn % 2 else list(epochs)[::-1]  # of equal progress the first takes a turn
        sides = {
            name: sample(task, slots=slots, drafts=name == "drafts", most=most, warm_up=most // WARM_UP)
            for name in names
        }
        for name, found in abreast(sides).items():
            epochs[name].append(found)
        ratios = [one / other for one, other in zip(*(each[-1].rates for each in epochs.values()), strict=True)]
        log_line(f"round {turn + 1} of {rounds}: {', '.join(f'{one:.3f}' for one in ratios)} by epochs")
    drafts = sum_drafts(found.drafts for found in epochs["drafts"])
    rows = []
    for epoch in range(EPOCHS):
        with_drafts, plain = ([found.rates[epoch] for found in epochs[name]] for name in ("drafts", "plain"))
        seconds = min(found.seconds[epoch] for found in epochs["plain"])
        words = (
            f"{most} responses, epoch {epoch + 1}, {seconds:.1f} CPU seconds without drafts;"
            f" {median(with_drafts):,.0f} and {median(plain):,.0f} tokens per"
            f" CPU second; {drafts.accepted:,} of {drafts.drafted:,} drafted tokens accepted in all rounds,"
            f" {drafts.accepted_per_pass:.2f} in a pass of a sequence; {drafts.near} of {drafts.verified:,}"
            f" verified tokens within {NEAR:g} of another"
        )
        name = f"{task.name}: speculation_speedup c{slots} epoch {epoch + 1}"
        rows.append(Ratio.between(with_drafts, plain).row(name, words))
    words = f"responses to draft from, at most; the bound is {MOST_BYTES / 2**20:.0f} MiB"
    corpus_bytes = max(found.corpus_bytes for found in epochs["drafts"])
    rows.append(Row(f"{task.name}: corpus c{slots}", corpus_bytes / 2**20, "MiB", words))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--identity", type=int, default=0, help="compare so many responses of each epoch")
    parser.add_argument("--slots", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    help_text = "of each epoch at 64 sequences; half as many at 16, a quarter at 4, an eighth at 1"
    parser.add_argument("--responses", type=int, default=4096, help=help_text)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    rows: list[Row] = []
    with torch.inference_mode():
        for run in options.runs:
            with tempfile.TemporaryDirectory() as folder:
                task = open_task(run, Path(folder, "model"), prompts=options.prompts)
                if options.identity:
                    rows += identity(task, most=options.identity)
                for slots in options.slots:
                    most = max(1, round(options.responses * slots**0.5 / 8))
                    rows += speed(task, slots=slots, rounds=options.rounds, most=most)
                    log_line("\n".join(f"{row.name} {row.value:.3f}" for row in rows[-EPOCHS - 1 :]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows.append(Row("peak memory", peak, "GiB", "of this process, with both engines"))
    show("speculation", rows, as_json=options.json)


if __name__ == "__main__":
    main()
