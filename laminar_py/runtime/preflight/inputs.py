"""Checks of a config before any process starts, and the inputs that they read. Called by the command line.

A check raises ConfigError with one line that names field, value and remedy.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from laminar_py.config.cluster import Device
from laminar_py.config.data import SourceConfig
from laminar_py.config.engine import BACKENDS
from laminar_py.config.learner import Attention, check_heads
from laminar_py.config.registry import find_file
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.config.tracking import TRACKERS
from laminar_py.config.warm_start import WARM_STARTS, WarmStartKind
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.problems import ProblemSet, check_disjoint, first_of_tasks, read_prompts
from laminar_py.data.sources import DataSource
from laminar_py.data.stream import PromptStream
from laminar_py.data.tokenizer import Tokenizer, load_tokenizer
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.engines.sglang.launch import check_pool
from laminar_py.learner.model_folder import check_tied_head, stored_tensors
from laminar_py.ledger.segments.writer import LEAST_FREE
from laminar_py.records.codec import IntArray
from laminar_py.records.host import visible
from laminar_py.records.pieces import Recording
from laminar_py.records.trajectory import Prompt
from laminar_py.relay.tree import versions_at_peak
from laminar_py.reward.calls.child import WriteFence
from laminar_py.reward.failures import Trial, trials
from laminar_py.runtime.preflight.rewards import check_rewards
from laminar_py.runtime.preflight.teacher import check_teacher

PREPARE_S = 600  # limit of the script `data.prepare`
PROBES, PROBE_TOKENS = 2, 512  # of each kind, and the longest
FRAME = re.compile(r'File "(.+)", line (\d+)')
SHOWN_CHARS = 2000  # of the prompt that a run shows at its start


@dataclass(frozen=True, slots=True)
class Problems:
    """The problems of each source of `data.train` and of each set of `eval`."""

    train: list[ProblemSet]
    sets: dict[str, ProblemSet]

    @property
    def all(self) -> list[ProblemSet]:
        """All sources and sets."""
        return [*self.train, *self.sets.values()]

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the rows, by the config field of a source or set."""
        return {problems.source.field: problems.digest for problems in self.all}


def prompt_room(config: RunConfig) -> dict[str, int]:
    """Return how many tokens a prompt may have beside a response of full length, by evaluation set."""
    run = config.rollout.sampling.params()
    caps = {name: settings.sampling(run).max_new_tokens for name, settings in config.eval.sets.items()}
    caps[""] = config.rollout.sampling.max_new_tokens
    return {name: config.rollout.max_len - cap for name, cap in caps.items()}


def read_problems(config: RunConfig, encoder: PromptEncoder, *, limited: bool, trains: bool = True) -> Problems:
    """Read the evaluation sets of a run, and its training data if it `trains`. Raises `ConfigError`.

    `limited` refuses prompts without room for a whole response. A prefix makes the ids of several sources unique.
    """
    sources = config.data.train if trains else ()
    room = prompt_room(config)

    def read(field: str, settings: SourceConfig, prefix: str, name: str) -> ProblemSet:
        limit = room[name] if limited else None
        source = DataSource(field, settings)
        return read_prompts(source, encoder=encoder, max_prompt_tokens=limit, prefix=prefix)

    if len(sources) == 1:
        train = [read("data.train", sources[0], "", "")]
    else:
        train = [
            read(f"data.train.{index}", settings, f"train.{index}/", "") for index, settings in enumerate(sources)
        ]
    sets = {
        name: read(f"eval.sets.{name}", settings, f"{name}/", name) for name, settings in config.eval.sets.items()
    }
    return Problems(train, sets)


def shown_prompt(prompt: Prompt, tokenizer: Tokenizer, *, opening: str) -> str:
    """Return lines that show a prompt as the model gets it: its size, end-of-response ids and escaped text.

    `opening` is the text that opens the assistant's turn where an environment does, else "".
    """
    ends = " or ".join(f"{tokenizer.word(id)!r} (id {id})" for id in tokenizer.eos_ids)
    text = prompt.text[:SHOWN_CHARS] + ("..." if len(prompt.text) > SHOWN_CHARS else "")
    lines = [f"prompt {prompt.id}, {len(prompt.ids)} tokens; a response ends with {ends}", *_indented(text)]
    if opening:
        about = "then messages of the environment, if it begins with any, and the beginning of the response:"
        lines += [about, *_indented(opening)]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"  {visible(line)}" for line in text.split("\n")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of a run: tokenizer, training prompts, evaluation prompts, and digests of their rows."""

    tokenizer: Tokenizer
    stream: PromptStream
    sets: dict[str, list[Prompt]]
    first_of_tasks: list[Prompt]  # one prompt of each task, from the training data if possible
    digests: dict[str, str]  # of problems and demonstrations, by field of the config
    messages: bool = False  # True if the chat template writes some of the prompts
    opening: str = ""  # text that opens the assistant's turn where an environment does
    probes: Sequence[IntArray] = ()  # prompts by which engines are compared with the learner

    @property
    def example(self) -> str:
        """Lines that show the prompt of one task as the model gets it."""
        return shown_prompt(self.first_of_tasks[0], self.tokenizer, opening=self.opening)


def check_inputs(config: RunConfig, *, trains: bool = True) -> Inputs:
    """Run `data.prepare` if set; check trackers, model, data, reward, engine and memory; return the inputs.

    Training data and the teacher are read only if the run `trains`. Raises `ConfigError`.
    """
    for kind in config.tracking.kinds:
        TRACKERS.get(kind).check()
    prepare(config)
    check_model(config)
    tokenizer = load_tokenizer(config.model.path)
    _check_vocabulary(config, tokenizer)
    encoder = PromptEncoder(tokenizer, config.model.path, config.data.chat, config.environment)
    problems = read_problems(config, encoder, limited=True, trains=trains)
    for heldout in problems.sets.values():
        check_disjoint(heldout, problems.train)
    if trains:
        check_teacher(config, tokenizer, texts=[prompt.text for prompt in first_of_tasks(problems.all)])
    digests = problems.digests
    if (warm_start := config.warm_start) is not None:
        digests["warm_start.data"] = WARM_STARTS.get(warm_start.kind).check(config, encoder).digest
    check_adapters(config)
    _check_learner(config)
    tasks = {task for problem_set in problems.all for task in problem_set.tasks}
    terms = {task: terms for task, terms in config.reward.by_task.items() if trains or task in tasks}
    reward = config.reward.model_copy(update={"by_task": terms})
    check_rewards(
        reward,
        problems.all,
        fence=WriteFence(str(config.runs), str(config.relay.shm)),
        sandbox=config.sandbox if config.cluster.address is None else None,
        trials=() if config.has_environment else _trials(config, problems, tokenizer),
    )
    check_engine(config)
    if config.cluster.address is None:  # else `preflight.node_checks` looks at the nodes themselves
        for pool in config.reward.servers:
            check_pool(config.reward, pool)
        check_shared_memory(config)
        if (fault := room_fault(config.runs)) is not None:
            raise ConfigError(fault)
    stream = PromptStream(problems.train, config.data, seed=config.seed)
    return Inputs(
        tokenizer=encoder.tokenizer,  # with a chat template, the end of a turn also ends a response
        stream=stream,
        probes=_probes(config, stream) if trains else (),
        sets={name: list(problem_set) for name, problem_set in problems.sets.items()},
        first_of_tasks=first_of_tasks(problems.all),
        messages=encoder.uses_template,
        opening=encoder.opening,
        digests=digests,
    )


def _trials(config: RunConfig, problems: Problems, tokenizer: Tokenizer) -> list[Trial]:
    """Return trials of the reward, with the text of their responses, for one prompt of each task that has one."""
    prompts = [prompt for prompt in first_of_tasks(problems.all) if config.reward.of_task(prompt.task)]
    made = trials(prompts, encode=tokenizer.encode, end=tokenizer.eos_ids[0])
    texts = [tokenizer.decode(trial.request.response_ids) for trial in made]
    return [
        replace(trial, request=msgspec.structs.replace(trial.request, response=text))
        for trial, text in zip(made, texts, strict=True)
    ]


def _probes(config: RunConfig, stream: PromptStream) -> list[IntArray]:
    """Return prompts for probes: the first of the run, and random tokens, which touch more of the vocabulary.

    None where an engine is emulated, or samples from a part of the vocabulary, whose probabilities it rescales.
    """
    rollout = config.rollout
    if rollout.sampling.cuts_vocabulary or rollout.engine.emulates is not None:
        return []
    longest = min(PROBE_TOKENS, rollout.max_len - 1)
    rng, vocab = np.random.default_rng(config.seed), read_sizes(config.model.path).vocab_size
    real = [stream.prompt(place).ids[:longest] for place in range(PROBES)]
    drawn = [rng.integers(0, vocab, min(16, longest)).astype(np.int32) for _ in range(PROBES)]
    return [ids for ids in (*real, *drawn) if len(ids)]


def stop_ids(config: RunConfig) -> tuple[int, ...]:
    """Return the ids that may end a response: first from the chat template, then from the model."""
    tokenizer = load_tokenizer(config.model.path)
    encoder = PromptEncoder(tokenizer, config.model.path, config.data.chat, config.environment)
    return tokenizer.with_ends(encoder.template_ends()).eos_ids


def prepare(config: RunConfig) -> None:
    """Run the script `data.prepare`, if set, which makes missing files."""
    script = config.data.prepare
    if script is None:
        return
    if not script.is_file():
        raise ConfigError(f"data.prepare={script}: no such file; name a Python script or leave the field out")
    try:
        command = [sys.executable, str(script)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PREPARE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"data.prepare={script}: not done after {PREPARE_S} s; run it by hand, and leave the field out"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1] + _last_line_of(script, done.stderr)
        raise ConfigError(f"data.prepare={script}: exit code {done.returncode} ({last}); fix the script")
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            f"model.path={config.model.path}: no config.json in it, and data.prepare={script} ran and did not make"
            " it; name the folder that the script makes, or another folder with a model"
        )


def _last_line_of(script: Path, traceback: str) -> str:
    """Return the last line of a script in a traceback, e.g. " (at make.py:7)"; "" if there is none."""
    frames = [(Path(file), line) for file, line in FRAME.findall(traceback)]
    line = next((line for file, line in reversed(frames) if file.name == script.name), None)
    return "" if line is None else f" at {script}:{line}"


def check_model(config: RunConfig, *, needs_weights: bool = True) -> None:
    """Raise `ConfigError` if the tied head of the model or a frozen model differs from its embedding.

    With `needs_weights`, also if one of them lacks its config or its weights.
    """
    path, reference = config.model.path, config.algorithm.reference
    if needs_weights and not (path / "config.json").is_file():
        raise ConfigError(f"model.path={path}: no config.json in it; name a Hugging Face model folder")
    folders = [] if config.model.from_scratch else [("model.path", path, " or set model.from_scratch=true")]
    if reference is not None and config.algorithm.has_reference:
        folders.append(("algorithm.reference", reference, ""))
    if config.algorithm.teacher_folder is not None:
        folders.append(("algorithm.teacher", config.algorithm.teacher_folder, ""))
    for field, folder, other in folders:
        has_weights = any(folder.glob("*.safetensors"))
        if needs_weights and not has_weights:
            raise ConfigError(f"{field}={folder}: no *.safetensors in it; name a folder with weights{other}")
        if has_weights and read_sizes(folder).tie_word_embeddings:
            check_tied_head(folder, field=field)


def check_warm_start(config: RunConfig) -> WarmStartKind:
    """Check what a warm start needs, and return its kind. Raises `ConfigError`."""
    assert config.warm_start is not None, "called only for a run with a warm start"
    check_model(config)
    tokenizer = load_tokenizer(config.model.path)
    _check_vocabulary(config, tokenizer)
    kind = WARM_STARTS.get(config.warm_start.kind)
    kind.check(config, PromptEncoder(tokenizer, config.model.path, config.data.chat, config.environment))
    return kind


def initial_folder(config: RunConfig) -> Path:
    """Return the folder of the model that RL begins with: `model.path`, or its warm start in the cache."""
    settings = config.warm_start
    return config.model.path if settings is None else WARM_STARTS.get(settings.kind).folder(config)


def _check_learner(config: RunConfig) -> None:
    """Refuse settings that the learner's device or model does not allow."""
    learner, device = config.learner, config.learner_device
    _check_rounding(config)
    if config.algorithm.objective_file is not None:
        find_file(config.algorithm.objective_file, field="algorithm.objective")
    if learner.offload and device is not Device.CUDA:
        raise ConfigError(
            f"learner.offload=true: the learner is on {device}, whose memory is the host's; set it to false"
        )
    if device is Device.CPU and learner.attention not in (Attention.AUTO, Attention.SDPA):
        raise ConfigError(
            f"learner.attention={learner.attention}: needs a GPU, and the learner is on {device}; set it to auto"
        )
    sizes = read_sizes(config.model.path)
    check_heads(sizes.num_key_value_heads or sizes.num_attention_heads or 1, learner.context_parallel)
    max_len, positions = config.rollout.max_len, sizes.max_position_embeddings
    if positions is not None and max_len > positions:
        raise ConfigError(
            f"rollout.max_len={max_len}: the model in model.path has {positions} positions; lower max_len, or name"
            " a folder whose config.json scales them"
        )


def _check_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` if the tokenizer has more ids than the model has embeddings. Fewer ids are allowed."""
    path = config.model.path
    rows = read_sizes(path).vocab_size
    if tokenizer.num_ids > rows:
        raise ConfigError(
            f"model.path={path}: its tokenizer has {tokenizer.num_ids} ids and its model a vocab_size of {rows};"
            " name a folder whose tokenizer.json belongs to its config.json"
        )


def check_engine(config: RunConfig) -> None:
    """Check that the model has the data that engines record, and the needs of their backend.

    Raises ConfigError.
    """
    experts = read_sizes(config.model.path).num_experts_per_tok
    if Recording.ROUTED_EXPERTS in config.rollout.record and experts is None:
        raise ConfigError("rollout.record=routed_experts: the model in model.path has no experts; leave it out")
    kind = config.rollout.engine.kind
    with BACKENDS.naming_package(kind):
        BACKENDS.get(kind).check_start(config)


def _check_rounding(config: RunConfig) -> None:
    """Raise ConfigError if `learner.rounds_weights` is set and the model has experts."""
    if config.learner.rounds_weights and read_sizes(config.model.path).num_experts_per_tok is not None:
        raise ConfigError(
            f"learner.rounds_weights=true: the model in model.path={config.model.path} has experts, which the"
            " learner does not round; set it to false"
        )


def check_adapters(config: RunConfig) -> None:
    """Raise ConfigError if `learner.lora` is set and peft is missing or the model has experts."""
    if config.learner.lora is None:
        return
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("learner.lora: needs peft; install laminar-py[lora], or leave learner.lora out")
    if read_sizes(config.model.path).num_experts_per_tok is not None:
        raise ConfigError(
            f"learner.lora: the model in model.path={config.model.path} has experts, which are not adapted; leave"
            " learner.lora out"
        )


def num_parameters(model: Path) -> int:
    """Return the number of weights: in the safetensors, or an estimate from config.json without them."""
    if stored := stored_tensors(model):
        return sum(count for count, _ in stored.values())
    sizes = read_sizes(model)
    hidden, layers = sizes.hidden_size or 0, sizes.num_hidden_layers or 0
    per_layer = 4 * hidden * hidden + 3 * hidden * (sizes.intermediate_size or 0)
    return layers * per_layer + (1 if sizes.tie_word_embeddings else 2) * sizes.vocab_size * hidden


def version_bytes(config: RunConfig) -> int:
    """Return the bytes of a published version: all weights, or an upper bound for adapters."""
    model, lora = config.model.path, config.learner.lora
    if lora is None:
        files = list(model.glob("*.safetensors"))
        return sum(file.stat().st_size for file in files) if files else 4 * num_parameters(model)
    sizes = read_sizes(model)
    hidden, layers, inner = sizes.hidden_size or 0, sizes.num_hidden_layers or 0, sizes.intermediate_size or 0
    return 4 * lora.rank * layers * len(lora.targets) * (hidden + max(hidden, inner))


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Number of parts on one host that keep versions in shared memory, e.g. `MemoryShare(3, 2, True)`."""

    num_relays: int
    num_replicas: int
    has_root: bool  # whether the root relay is here, which keeps the versions of deferred evaluations


def check_shared_memory(config: RunConfig, *, runs: int = 1) -> None:
    """Raise `ConfigError` if shared memory of this host has no room for the versions of `runs` parallel runs."""
    relay = config.relay
    if not relay.shm.is_dir():
        raise ConfigError(f"relay.shm={relay.shm}: no such folder; name one in shared memory, e.g. /dev/shm")
    free = shutil.disk_usage(relay.shm).free
    share = MemoryShare(relay.nodes, config.rollout.replicas, has_root=True)
    fault = memory_fault(config, share, free=free // runs)
    if fault is not None:
        beside = f"; {runs} runs share it, so set parallel lower" if runs > 1 else ""
        raise ConfigError(f"{fault}{beside}; `laminar clean` lists what stopped runs keep there")


def memory_fault(config: RunConfig, share: MemoryShare, *, free: int, where: str = "") -> str | None:
    """Return an error line if a run's versions on a host need more than `free` bytes, else None.

    `where` names the host in the line, e.g. " on node 10.0.0.4". Reads the size of the model in `model.path`.
    """
    relay = config.relay
    held = config.num_evaluations if config.eval.deferred and share.has_root else 0
    versions = versions_at_peak(
        keep_versions=relay.keep_versions, num_replicas=share.num_replicas + held, num_nodes=share.num_relays
    )
    needed = versions * version_bytes(config)
    if needed <= free:
        return None
    holders = f"{share.num_replicas} held by replicas" + (f", {held} by deferred evaluations" if held else "")
    return (
        f"relay.shm={relay.shm}: {free / 2**30:.2f} GiB free{where}, {needed / 2**30:.2f} needed for {versions}"
        f" versions (at each of {share.num_relays} relays relay.keep_versions={relay.keep_versions}, 1 arriving"
        f" and 1 that deltas build on or a slow child fetches; {holders}); enlarge it, or lower one of these"
    )


# ---- room for segments


def room_fault(folder: Path) -> str | None:
    """Return an error line if this host cannot write the folder of runs, or has too little disk for responses."""
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return f"runs={folder}: cannot be written; make it writable, or name another folder"
    free = shutil.disk_usage(place).free
    if free >= LEAST_FREE:
        return None
    return (
        f"runs={folder}: {free / 2**20:.0f} MiB are free, and responses are stored there; make room for"
        f" {LEAST_FREE / 2**20:.0f} MiB at least, or name another folder"
    )
