"""Process rewards of a real SGLang server on the CPU: as a plain forward has them, and in a run with a crash.

The model is random: how steps are asked about, kept and trained on is what is shown. A start takes about 20 s.
"""

import asyncio
import json
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3ForCausalLM

from laminar_contrib.reward_models.steps import StepsTerm, open_steps, separated, step_ends
from laminar_lab.audit.queries import accounting
from laminar_lab.audit.stored import StoredResponses
from laminar_lab.audit.verify import verify
from laminar_py.config.algorithm import Advantage
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import ServeContext
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.engines.sglang import server as server_module
from laminar_py.engines.sglang.server import SGLangServer
from laminar_py.learner.losses.advantages import group_advantages
from laminar_py.ledger.database import reading
from laminar_py.records.columns import TOKEN_REWARDS
from laminar_py.records.credit import earned_by, returns_of
from laminar_py.records.trajectory import Kind, Status
from tests.engines.sglang.rig import make_model, make_spec
from tests.reward.requests import make_request
from tests.runs.runs import ALONE, LAMINAR, REPO, TrainProcess

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

SEPARATOR, LABELS, ENDS, VOCAB = 2, (5, 6), ";", 124  # of the quickstart's vocabulary
NEAR = 1e-4
KEY = "PRM_KEY"


class ModelServer:
    """A server of a process reward model, which can be killed and started anew under its address."""

    def __init__(self, folder: Path) -> None:
        self.model_dir = make_model(folder / "prm", seed=3, vocab=VOCAB, max_len=4096)
        self.plain = Qwen3ForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        self._spec = make_spec(self.model_dir, folder, max_len=4000, flags={"load-format": "auto"})
        self.server = SGLangServer(self._spec)

    async def kill(self) -> None:
        below = psutil.Process(self.server.pid).children(recursive=True)
        (launcher,) = (process for process in below if "sglang.launch_server" in process.cmdline()[1:3])
        launcher.kill()
        await self.server.stop()

    async def start_anew(self) -> None:
        last, self.server = self.server, SGLangServer(self._spec)
        self.server.api_key = last.api_key
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_module, "_free_port", lambda host: int(last.url.rsplit(":", 1)[1]))
            await self.server.start()

    def plain_scores(self, prompt: np.ndarray, ids: np.ndarray, ends: list[int]) -> np.ndarray:
        given = [*prompt.tolist(), *separated(ids, ends, SEPARATOR)]
        with torch.no_grad():
            labels = self.plain(torch.tensor([given])).logits[0, :, list(LABELS)]
        shares = torch.softmax(labels, -1)[:, 0].numpy()
        return shares[[len(prompt) + end + 1 + number for number, end in enumerate(ends)]]

    def settings(self) -> dict[str, object]:
        ids = {"separator_id": SEPARATOR, "labels": list(LABELS)}
        return {"kind": "steps", "urls": [self.server.url], "key": KEY, "ends": ENDS, **ids}

    def term(self) -> StepsTerm:
        return StepsTerm.model_validate_json(json.dumps(self.settings()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prm(tmp_path_factory):
    model = ModelServer(tmp_path_factory.mktemp("prm"))
    await model.server.start()
    yield model
    await model.server.stop()


def text_of(ids: np.ndarray) -> str:
    return "".join(ENDS if id == 9 else "x" for id in ids)


def context(prm: ModelServer, folder: Path) -> ServeContext:
    async def none_launched(pool: str) -> list:
        raise AssertionError(pool)

    return ServeContext(
        timeout_s=60.0,
        folder=folder,
        env={KEY: prm.server.api_key},
        sandbox=SandboxConfig(),
        decode=text_of,
        addresses=none_launched,
    )


@pytest.mark.parametrize(("steps", "each"), [(1, 7), (40, 50)])
async def test_scores_of_steps_are_those_of_a_plain_forward(prm, tmp_path, steps, each):
    ids = np.random.default_rng(0).integers(10, VOCAB, steps * each, dtype=np.int32)
    ids[each - 1 : -1 : each] = 9
    prompt = np.arange(10, 30, dtype=np.int32)
    request = make_request("", prompt_ids=prompt, response_ids=ids)
    async with open_steps(prm.term(), context(prm, tmp_path)) as reward:
        found = (await reward(request)).value
    ends = [*step_ends(ids, text_of, ENDS), len(ids) - 1]
    assert len(ends) == steps
    assert np.flatnonzero(found).tolist() == ends
    assert found[ends] == pytest.approx(prm.plain_scores(prompt, ids, ends), abs=NEAR)
    assert np.ptp(found[ends]) > 0.1 or steps == 1


def retries(run: Path) -> int:
    return (run / "logs/scorer-0.log").read_text().count(" is called again: ")


async def test_a_run_trains_on_scores_of_steps_though_their_server_is_killed_twice(prm, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, prm.server.api_key)
    exact = {"kind": "exact", "pattern": "#(\\d)$"}
    rewards = f"reward.use={[exact, prm.settings()]}".replace("'#", '"#').replace("$'", '$"')
    settings = (*ALONE, "steps=10", "eval.sets={}", rewards, f"reward.env=[{KEY}]")
    with TrainProcess(tmp_path, *settings) as run:
        for step in (1, 4):
            await asyncio.to_thread(run.wait_for_step, step)
            before = retries(run.run)
            await prm.kill()
            await asyncio.to_thread(run.wait_until, lambda before=before: retries(run.run) > before)
            await prm.start_anew()
        code, output = await asyncio.to_thread(run.finish)
    assert code == 0, output
    assert verify(run.run) == []
    assert accounting(run.run).balanced
    await check_scores(prm, run.run)
    await check_commands(run.run)


async def check_scores(prm: ModelServer, run: Path) -> None:
    """Every reward is that of a plain forward, and so are advantages; a crashed server leaves none."""
    decode = load_tokenizer(REPO / "experiments/quickstart/data/model").decode
    groups = defaultdict(list)
    with reading(run) as connection:
        responses = StoredResponses(run, connection)
        for row, prompt, payload in responses.all_responses():
            if row.reward is None:
                continue
            ends = step_ends(payload.ids, decode, ENDS)
            ends += [len(payload.ids) - 1] if ends[-1:] != [len(payload.ids) - 1] else []
            columns = responses.columns(row)
            given, scores = columns[TOKEN_REWARDS].array, prm.plain_scores(prompt.ids, payload.ids, ends)
            right = given[-1] - scores[-1]
            assert given[ends[:-1]] == pytest.approx(scores[:-1], abs=NEAR)
            assert min(abs(right), abs(right - 1)) < NEAR, "the exact answer counts at the last token"
            assert row.reward == pytest.approx(scores.sum() + round(right), abs=NEAR)
            if row.kind is Kind.TRAIN and row.advantage is not None:
                groups[row.group_id].append((row, returns_of(row.reward, earned_by(columns))))
    trained = [rows for rows in groups.values() if any(row.status is Status.CONSUMED for row, _ in rows)]
    assert len(trained) == 40
    for rows in trained:
        advantages, _ = group_advantages(Advantage.GROUP_STD)([returns for _, returns in rows])
        assert [row.advantage for row, _ in rows] == pytest.approx(advantages, abs=1e-6)
        assert np.ptp(advantages) > 0


async def check_commands(run: Path) -> None:
    """`audit show` tells the scores of steps, and `rescore` finds them again."""
    for words in (["audit", str(run), "show", "g0.0"], ["rescore", str(run)]):
        done = await asyncio.to_thread(
            subprocess.run, [LAMINAR, *words], cwd=REPO, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert words[0] == "rescore" or "steps 0." in done.stdout
