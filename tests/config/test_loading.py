"""A config is checked before anything starts, and a fault names field, value and remedy."""

import importlib.util
import re
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from laminar_py.config.algorithm import Advantage, AlgorithmConfig, ReferencePass
from laminar_py.config.changes import unquantized
from laminar_py.config.engine import BACKENDS
from laminar_py.config.loading import dump_config, load_config, parse_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.records.columns import MODEL_COLUMNS, REFERENCE_LOGPROBS, TEACHER_LOGPROBS, Source

REPO = Path(__file__).parents[2]
MINIMAL = {
    "reward": {"use": [{"kind": "exact", "pattern": "(.+)"}]},
    "name": "t",
    "steps": 3,
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
}

SGLANG = {"kind": "sglang"}
EMULATED = {"engine": {"kind": "emulated", "profile": "p"}}
URLS = {**SGLANG, "urls": ["http://a"]}
SERVED = {"learner": {"lora": {}}, "rollout": {"engine": SGLANG}}


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("reward.use=[{kind: exact, patern: x}]", "reward.use.0.pattern"),
        ("environment={kind: tools, tools: {uses: [calculator]}}", "environment.tools.use"),
        ("warm_start.step=4", "warm_start.steps"),
        ("learner.learning_rate=1e-6", "learner.lr (TRL's learning_rate)"),
    ],
)
def test_an_unknown_key_is_answered_with_the_key_that_was_meant(override, meant):
    with pytest.raises(ConfigError, match=re.escape(f"unknown key; did you mean {meant}?")):
        load_config(Path(__file__).parents[2] / "configs/quickstart.yaml", [override])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stepz": 1}, "stepz=1: unknown key; did you mean steps? docs/config.md lists"),
        (
            {"lr": 1e-3},
            "lr=0.001: unknown key; did you mean algorithm.critic.lr or learner.lr? docs/config.md lists",
        ),
        ({"learnr": {}}, "learnr={}: unknown key; did you mean learner? docs"),
        ({"rollout": {"sampling": {"top-k": 5}}}, "key; did you mean rollout.sampling.top_k? docs"),
        ({"rollout": {"engine": {**SGLANG, "tensor_paralel": 2}}}, "did you mean rollout.engine.tensor_parallel?"),
        ({"algorithm": {"clip_hi": 0.3}}, "algorithm.clip_hi=0.3: unknown key; did you mean algorithm.clip_high?"),
        ({"elephants": 3}, "elephants=3: unknown key; docs/config.md lists"),
        ({"learner": {"learning_rate": 1e-6}}, "did you mean learner.lr (TRL's learning_rate)? docs"),
        (
            {"num_generations": 8},
            "num_generations=8: unknown key; did you mean rollout.group_size (TRL's num_gener",
        ),
        (
            {"data": {"train_batch_size": 8}},
            "did you mean rollout.prompts_per_step (verl's train_batch_size)? docs",
        ),
        ({"bf16": True}, "bf16=True: unknown key; TRL's bf16 has no counterpart: GPUs compute in bf16"),
        ({"trainer": {"nnodes": 1}}, "trainer: a section of verl; laminar init --from verl FILE translates"),
        ({"rollout": {"engine": {"stepz": 1}}}, "rollout.engine.stepz=1: unknown key; docs/config.md lists"),
        ({"steps": "many"}, "steps='many': input should be a valid integer"),
        ({"steps": 0}, "steps=0: input should be greater than or equal to 1"),
        ({"rollout": {"replicas": True}}, "rollout.replicas=True"),
        ({"rollout": {"sampling": {"top_p": 0.9}}}, "add sampling_mask to rollout.record"),
        ({"rollout": {"max_len": 512, "sampling": {"max_new_tokens": 512}}}, "leaves no room for a prompt"),
        ({"packer": {"max_tokens": 100}}, "packer.max_tokens=100 is below rollout.max_len"),
        ({"buffer": {"capacity": 10}}, "buffer.capacity=10 is below one learner step"),
        ({"buffer": {"replay": {"share": 0.01}}}, "less than one group; raise share to at least 0.0312"),
        ({"buffer": {"replay": {"share": 1.0}}}, "buffer.replay.share=1.0: input should be less than 1"),
        (
            {"buffer": {"replay": {"share": 0.5, "capacity": 8}}},
            "buffer.replay.capacity=8: buffer.replay.share=0.5 replays 16 groups a step",
        ),
        (
            {"buffer": {"replay": {"share": 0.9}}},
            "buffer.replay.most=4: buffer.replay.share=0.9 replays each group 7 times on average; raise most to",
        ),
        (
            {"buffer": {"replay": {"share": 0.9, "most": 20, "max_age": 2}}},
            "buffer.replay.max_age=2: buffer.replay.share=0.9 replays each group 7 times",
        ),
        (
            {
                "buffer": {"replay": {"share": 0.5}},
                "algorithm": {"kl_coef": 0.1, "reference_pass": "stage"},
            },
            "algorithm.reference_pass=stage: with buffer.replay.share=0.5 a resumed run would lack",
        ),
        (
            {
                "buffer": {"replay": {"share": 0.5}},
                "algorithm": {"teacher_coef": 1.0, "teacher": "models/teacher"},
            },
            "algorithm.teacher: with buffer.replay.share=0.5 a resumed run would lack the teacher's log-prob",
        ),
        ({"staleness": {"policies": ["drop", "reweight"]}}, "staleness.policies=drop,reweight: only one"),
        ({"staleness": {"max_staleness": 1}, "learner": {"publish_every": 3}}, "set it to at least 2"),
        ({"rollout": {"engine": {"urls": ["http://a"]}}}, "unknown key; set rollout.engine.kind=sglang"),
        (
            {"rollout": {"engine": {**SGLANG, "tensor_parallel": 0}}},
            "rollout.engine.tensor_parallel=0: input should",
        ),
        (
            {"rollout": {"engine": {"kind": "best"}}},
            "rollout.engine.kind=best: unknown; choose one of local, sglang",
        ),
        (
            {"rollout": {"engine": {"kind": "emulated"}}},
            "rollout.engine.profile: missing; add it",
        ),
        ({"rollout": {"engine": "sglang"}}, "rollout.engine='sglang': not a section with a `kind`"),
        ({"repack": {"planner": "best"}}, "repack.planner=best: unknown; choose one of predictive, paper"),
        ({"schedule": "later"}, "schedule='later'"),
        ({"learner": {"lora": {"targets": ["lm_head"]}}}, "learner.lora.targets.0='lm_head'"),
        ({"learner": {"lora": {"targets": ["q_proj", "q_proj"]}}}, "learner.lora.targets=q_proj,q_proj: a name"),
        ({"learner": {"lora": {}}, "model": {"path": "m", "from_scratch": True}}, "engines need the base"),
        (
            {"warm_start": {"data": {"path": "d", "task": "sums"}}},
            "warm_start.data.task='sums': demonstrations have no task; leave it out",
        ),
        (
            {**SERVED, "warm_start": {"data": "d"}},
            "warm_start.kind=supervised: with learner.lora SGLang servers begin with",
        ),
        ({**SERVED, "rollout": {"engine": URLS, "replicas": 1}}, "rollout.engine.urls=http://a: running servers"),
        (
            {**SERVED, "rollout": {"engine": SGLANG, "on_new_weights": "retract"}},
            "rollout.on_new_weights=retract: a",
        ),
        ({"learner": {"lora": {}}, "rollout": EMULATED}, "learner.lora: an emulated learner has no"),
        (
            {"eval": {"sets": {"aime": {"path": "a", "samples": 32}}}},
            "eval.sets.aime.temperature=0: all samples=32 answers are equal",
        ),
        (
            {"eval": {"sets": {"aime": {"path": "a", "max_new_tokens": 2048}}}},
            "eval.sets.aime.max_new_tokens=2048 leaves no room for a prompt in rollout.max_len=2048",
        ),
        ({"schedule": "sync", "repack": {"planner": "paper"}}, "repack.planner=paper moves nothing under"),
    ],
)
def test_a_fault_names_field_and_value_in_one_line(change, field):
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, **change})
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value), "a remedy follows"


STACKED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.mark.parametrize("targets", [named for n in range(1, 6) for named in combinations(STACKED, n)])
def test_sglang_servers_take_targets_as_they_stack_them_and_embedded_engines_any(targets):
    learner = {"lora": {"targets": [*targets, "o_proj"]}}
    parse_config({**MINIMAL, "learner": learner})
    mlp = set(targets) & {"gate_proj", "up_proj"}
    attention = [target for target in targets if target not in mlp]
    fits = attention in ([], ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj"]) and mlp != {"up_proj"}
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"targets=\S+: SGLang .*; name q_proj and"):
        parse_config({**MINIMAL, **SERVED, "learner": learner})


@pytest.mark.parametrize(
    ("replicas", "prompts", "batch"),
    [(2, 32, 256), (1, 4, 32), (5, 128, 416), (64, 8, 8)],  # of groups of 8
)
def test_a_replica_admits_twice_its_share_of_a_step_at_most_a_step_and_at_least_a_group(replicas, prompts, batch):
    rollout = {"replicas": replicas, "prompts_per_step": prompts}
    smallest = {
        "name": "a",
        "steps": 1,
        "model": {"path": "m"},
        "data": {"train": "d"},
        "reward": {"use": ["math"]},
    }
    assert parse_config({**smallest, "rollout": rollout}).rollout.batch_per_replica == batch
    for buffer in ({}, {"replay": {"share": 0.5}}):
        own = {**smallest, "buffer": buffer, "rollout": rollout | {"batch_per_replica": 48}}
        assert parse_config(own).rollout.batch_per_replica == 48


def test_a_replica_admits_no_more_for_groups_that_steps_replay():
    config = parse_config({**MINIMAL, "buffer": {"replay": {"share": 0.75, "most": 9}}})
    assert config.fresh_groups == 8
    assert config.rollout.batch_per_replica == config.new_per_step == 64
    assert config.capacity == 4 * 64 + 2 * 64
    assert parse_config(config.model_dump(mode="json")) == config


def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match=r"model: missing; add it"):
        parse_config({"name": "t", "steps": 1, "data": {"train": "x"}})


def test_a_dumped_config_reads_back_the_same():
    config = load_config(REPO / "configs" / "quickstart.yaml", ["seed=3"])
    assert parse_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": {"engine": {**SGLANG, "tensor_parallel": 2, "flags": {"lora-paths": [1, 2]}}}},
        {"rollout": {"engine": {**EMULATED["engine"], "verify_every": 3}}},
        {},
    ],
    ids=["sglang", "emulated", "local"],
)
def test_a_config_that_reaches_an_actor_as_json_has_the_section_of_its_backend(change):
    config = parse_config({**MINIMAL, **change})
    read = RunConfig.model_validate_json(config.model_dump_json())
    assert read == config
    section = BACKENDS.get(config.rollout.engine.kind).settings
    assert type(read.rollout.engine) is type(config.rollout.engine) is section


def test_an_engine_named_on_the_command_line_is_that_of_its_kind_whatever_the_file_says_of_another(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "rollout": {"engine": {**SGLANG, "tensor_parallel": 2}}}))
    assert load_config(path, ["rollout.engine.kind=local"]).rollout.engine.kind == "local"
    assert load_config(path, ["rollout.engine.device=cuda"]).rollout.engine.gpus == 2


def test_a_config_under_which_nothing_moves_repacks_only_if_it_is_asked_to_and_then_it_is_refused():
    assert parse_config(MINIMAL).repacks
    assert not parse_config({**MINIMAL, "schedule": "one_step"}).repacks
    assert not parse_config({**MINIMAL, "repack": {"planner": "none"}}).repacks


def test_the_config_of_the_readme_is_read_with_its_learning_rate(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert load_config(path, []).learner.lr == 1e-6


def test_overrides_reach_nested_settings_and_read_scientific_notation(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    config = load_config(path, ["learner.lr=1e-3", "rollout.replicas=4", "schedule=sync"])
    assert (config.learner.lr, config.rollout.replicas, config.schedule) == (1e-3, 4, "sync")


@pytest.mark.parametrize("text", ["off", "'off'"])
def test_off_is_a_word(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    config = load_config(path, [f"alarms.probes={text}", "model.from_scratch=true"])
    assert config.alarms.probes == "off"
    assert config.model.from_scratch is True


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", ""])
def test_a_file_that_holds_no_settings_is_refused(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config=.*c\.yaml"):
        load_config(path, [])


def test_the_settings_document_is_up_to_date():
    path = REPO / "docs" / "generate_config.py"
    spec = importlib.util.spec_from_file_location("generate_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (REPO / "docs" / "config.md").read_text() == module.document(), "run `make docs`"
    assert module.PAGE.read_text() == module.trainer_page(), "run `make docs`"


def test_an_algorithm_named_on_the_command_line_is_that_of_its_name_whatever_the_file_says_of_another(tmp_path):
    path = tmp_path / "config.yaml"
    section = {"name": "grpo", "clip_high": 0.28, "importance_cap": 2.0}
    path.write_text(yaml.safe_dump({**MINIMAL, "algorithm": section}))
    chosen = load_config(path, ["algorithm.clip_low=0.5", "algorithm.name=gspo"]).algorithm
    assert chosen == AlgorithmConfig(name="gspo", clip_low=0.5)
    assert load_config(path, ["algorithm.clip_low=0.5"]).algorithm.importance_cap == 2.0


TEACHER = {"name": "distill"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rollout": {"record": ["sampling_mask"]}}, "would record the whole vocabulary"),
        (
            {
                "rollout": {
                    "record": ["sampling_mask"],
                    "sampling": {"top_p": 0.9},
                    "engine": {"kind": "sglang"},
                }
            },
            "set top_k",
        ),
        (
            {"rollout": {"record": ["routed_experts"], **EMULATED}},
            "emulated engines have no experts",
        ),
        ({"algorithm": {"name": "tba", "aggregation": "token_mean"}}, "algorithm.aggregation=token_mean"),
        ({"algorithm": {"name": "tba", "correction": "negative_mask"}}, "algorithm.correction=negative_mask"),
        ({"algorithm": TEACHER}, "reward.use=exact gives one number"),
        ({"algorithm": {"teacher": "t"}}, "algorithm.teacher=t: has no effect with teacher_coef=0"),
        ({"algorithm": {**TEACHER, "teacher": "ftp://a"}}, "algorithm.teacher=ftp://a: no address of a server"),
        (
            {
                "algorithm": {**TEACHER, "teacher": "http://a:1"},
                "rollout": {"sampling": {"temperature": 0.7}},
            },
            "rollout.sampling.temperature=0.7; set that to 1",
        ),
        (
            {"algorithm": {**TEACHER, "teacher": "t"}, "packer": {"max_tokens": 8}},
            "a stage of algorithm.reference_pass or algorithm.teacher has one rank",
        ),
        ({"algorithm": {**TEACHER, "teacher": "t"}, "rollout": EMULATED}, "an emulated engine has no"),
        ({"algorithm": {"advantage": "none"}}, "algorithm.advantage=none leaves a loss without gradient"),
        ({"algorithm": {"reference_pass": "stage"}}, "there is no reference model with algorithm.kl_coef=0"),
        (
            {"algorithm": {"kl_coef": 0.1, "reference_pass": "stage"}, "rollout": EMULATED},
            "an emulated learner has no reference model",
        ),
        ({"algorithm": {"name": ["a"]}}, "algorithm.name=['a']: unknown"),
        ({"algorithm": {"kl_coef": 0.1}, "model": {"path": "m", "from_scratch": True}}, "algorithm.reference"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_by_name(change, words):
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, **change})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("advantage", list(Advantage))
def test_a_teacher_by_name_needs_no_column_of_the_reward_and_goes_with_any_advantage(advantage):
    algorithm = {**TEACHER, "teacher": "t", "advantage": advantage, "kl_coef": 0.1}
    found = parse_config({**MINIMAL, "algorithm": algorithm}).algorithm
    assert not found.scored_columns

    def of_models(settings):
        return [column.name for column in settings.packed_columns if column.source in MODEL_COLUMNS]

    assert of_models(found) == [TEACHER_LOGPROBS]
    staged = found.model_copy(update={"reference_pass": ReferencePass.STAGE})
    assert of_models(staged) == [TEACHER_LOGPROBS, REFERENCE_LOGPROBS]
    assert staged.stages == (Source.REFERENCE, Source.TEACHER)


def test_a_server_of_the_teacher_needs_no_device():
    algorithm = {**TEACHER, "teacher": "http://10.0.0.5:30000"}
    config = parse_config({**MINIMAL, "algorithm": algorithm})
    by_folder = parse_config({**MINIMAL, "algorithm": {**TEACHER, "teacher": "t"}})
    assert (config.algorithm.stages, config.algorithm.computing_stages) == ((Source.TEACHER,), ())
    assert by_folder.algorithm.computing_stages == (Source.TEACHER,)


@pytest.mark.parametrize("mistake", [AssertionError("ours"), ValueError("ours")])
def test_a_mistake_of_ours_in_a_check_is_no_complaint_about_a_setting(monkeypatch, mistake):
    def check(*_, staged):
        raise mistake

    monkeypatch.setattr("laminar_py.config.run.check_microbatches", check)
    with pytest.raises(type(mistake), match="ours") as caught:
        parse_config(MINIMAL)
    assert not isinstance(caught.value, ConfigError)


def test_a_file_that_is_no_text_is_refused_in_one_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00name: t")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(path, [])


@pytest.mark.parametrize("url", ["http://[::1", "10.0.0.5:30000", "http://", "http://a:port"])
def test_an_address_that_is_none_is_refused_by_name(url):
    with pytest.raises(ConfigError, match=r"rollout\.engine\.urls=.*no address of a server"):
        parse_config({**MINIMAL, "rollout": {"engine": {**SGLANG, "urls": [url, "http://b"]}}})


def test_an_override_with_the_engine_that_the_file_has_keeps_its_section(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "rollout": {"engine": {**SGLANG, "tensor_parallel": 2}}}))
    assert load_config(path, ["rollout.engine.kind=sglang"]).rollout.engine.tensor_parallel == 2
    assert load_config(path, ["rollout.engine.kind=local"]).rollout.engine.kind == "local"


def test_an_override_fills_a_section_that_a_dumped_config_leaves_out(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(parse_config(MINIMAL)))
    assert load_config(path, ["learner.lora.rank=8"]).learner.lora.rank == 8
    assert load_config(path, ["warm_start.data=d.jsonl", "warm_start.steps=3"]).warm_start.steps == 3
    fault = r"override=data\.train\.weight=2: train is a list, not a section; give the whole list"
    with pytest.raises(ConfigError, match=fault):
        load_config(path, ["data.train.weight=2"])


def test_an_override_goes_into_an_environment_that_is_only_a_path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "environment": "game.py:Game"}))
    environment = load_config(path, ["environment.workers=4"]).environment
    assert (environment.path, environment.workers) == ("game.py:Game", 4)


CPU = {**SGLANG, "device": "cpu"}


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ({"flags": {"speculative-algorithm": "EAGLE3"}}, "speculative-algorithm=EAGLE3: set rollout.engine.spec"),
        ({"flags": {"--speculative-algo": "NGRAM"}}, "speculative-algo=NGRAM: set rollout.engine.speculation"),
        ({"flags": {"speculative-accept-threshold-acc": 0.9}}, "speculative-accept-threshold-acc=0.9: only 1.0"),
        ({"flags": {"port": 1}}, "port=1: the run chooses it; leave it out"),
    ],
)
def test_flags_that_no_server_of_changing_weights_can_have_are_refused_before_a_run(engine, line):
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.flags\.(--)?{re.escape(line)}"):
        parse_config({**MINIMAL, "rollout": {"engine": {**SGLANG, **engine}}})


@pytest.mark.parametrize(
    ("engine", "record", "line"),
    [
        (CPU, [], "speculation=ngram: off CUDA SGLang takes the most probable token"),
        (SGLANG, ["routed_experts"], "speculation=ngram: records no routed_experts; leave out one"),
        ({**SGLANG, "urls": ["http://10.0.0.5:30000"]}, [], "speculation=ngram: a running server chose"),
        (EMULATED["engine"], [], "speculation=ngram: an emulated engine has no texts"),
    ],
)
def test_engines_that_cannot_draft_refuse_speculation(engine, record, line):
    rollout = {"engine": {**engine, "speculation": "ngram"}, "record": record, "replicas": 1}
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.{re.escape(line)}"):
        parse_config({**MINIMAL, "rollout": rollout})


@pytest.mark.parametrize(
    ("engine", "kind", "line"),
    [
        (CPU, "fp8", "SGLang rounds weights on CUDA only; leave it out"),
        (
            {**SGLANG, "urls": ["http://10.0.0.5:30000"]},
            "fp8",
            "a running server chose at its start; leave it out",
        ),
        ({"kind": "local"}, "fp8_kv", "the embedded engine rounds weights alone; set it to fp8"),
        (EMULATED["engine"], "fp8", "an emulated engine has no weights to round; leave it out"),
    ],
)
def test_engines_that_cannot_round_weights_refuse_it(engine, kind, line):
    rollout = {"engine": {**engine, "quantization": kind}, "replicas": 1}
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.quantization={kind}: {re.escape(line)}"):
        parse_config({**MINIMAL, "rollout": rollout})


def test_rounded_weights_bring_a_correction_whose_kind_the_config_may_choose():
    rounds = {**MINIMAL, "rollout": {"engine": {"quantization": "fp8"}}}
    for algorithm, correction in (
        ({}, "sequence_mask"),
        ({"proximal": "recompute"}, "tis"),
        ({"correction": "none"}, "sequence_mask"),  # as in the whole config of a run, which a resume reads
        ({"name": "decoupled_ppo"}, "tis"),
    ):
        config = parse_config({**rounds, "algorithm": algorithm})
        assert config.algorithm.correction == correction
        assert unquantized(config).algorithm == config.algorithm, "the loss stays as it is"
    assert parse_config(MINIMAL).algorithm.correction == "none"
    with pytest.raises(ConfigError, match="correction_low=3"):
        parse_config({**rounds, "algorithm": {"correction_low": 3.0}})
    with pytest.raises(ConfigError, match=r"^rollout\.engine\.quantization: .*learner\.lora"):
        parse_config({**rounds, "learner": {"lora": {"rank": 4}}})


def test_engines_speculate_where_they_can():
    for engine in (SGLANG, {"kind": "local"}):
        section = parse_config(
            {**MINIMAL, "rollout": {"engine": {**engine, "speculation": "ngram"}}}
        ).rollout.engine
        assert section.speculation == "ngram"
