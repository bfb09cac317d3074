"""Process rewards of a model on a server: steps, separators, credit; before a server that answers as SGLang."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from laminar_py.records.columns import TOKEN_REWARDS
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.steps import minimum_rewards, separated, step_ends
from tests.reward.requests import make_request
from tests.reward.test_scorer import score, scorer_of

SEPARATOR = 7
LABELS = [5, 6]


def ids_of(text: str) -> np.ndarray:
    return np.array([*map(ord, text)], np.int32)


def text_of(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "ends"),
    [("ab\n\ncd\n\ne", [3, 7, 8]), ("ab\n\n", [3]), ("ab", [1]), ("\n\n\n\n", [1, 3]), ("a\nb", [2])],
)
def test_a_step_ends_with_its_text_and_the_last_with_the_response(text, ends):
    assert step_ends(ids_of(text), text_of, "\n\n") == ends


def test_a_separator_stands_after_each_step():
    assert separated(np.array([1, 2, 3], np.int32), [0, 2], SEPARATOR) == [1, SEPARATOR, 2, 3, SEPARATOR]


def test_minimum_rewards_add_up_to_about_the_lowest_score():
    scores = np.array([0.9, 0.1, 0.8], np.float32)
    rewards = minimum_rewards(scores)
    assert rewards.sum() == pytest.approx(0.1, abs=0.01)
    assert rewards.argmax() == 1
    assert minimum_rewards(scores[:1]).tolist() == pytest.approx([0.9])


@asynccontextmanager
async def scored_by(answer, folder, **settings):
    """A scorer whose server gives `answer`; and what the server was sent."""
    sent = []

    async def reply(request: web.Request) -> web.Response:
        sent.append(await request.json())
        return web.json_response({"scores": answer, "model": "m"})

    app = web.Application()
    app.router.add_post("/v1/score", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    model = {"separator": "<s>", "separator_id": SEPARATOR, "labels": LABELS}
    term = {"kind": "steps", "urls": [url], **model} | settings
    try:
        async with scorer_of(folder, {"use": [term]}) as scorer:
            yield scorer, sent
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("credit", "total"), [("returns", 1.1), ("minimum", 0.2)])
async def test_each_step_is_rewarded_at_its_last_token(tmp_path, credit, total):
    answer = [[[0.9, 0.1], [0.2, 0.8]]]
    async with scored_by(answer, tmp_path, credit=credit) as (scorer, sent):
        (found,) = await score(scorer, make_request("a\n\nbc"))
    rewards = found.columns[TOKEN_REWARDS].array
    assert rewards.nonzero()[0].tolist() == [2, 4]
    assert found.value == pytest.approx(total, abs=0.01)
    assert found.terms[0].text == "steps 0.900 0.200"
    (body,) = sent
    assert (body["query"], body["items"]) == ([3], [[*map(ord, "a\n\n"), SEPARATOR, *map(ord, "bc"), SEPARATOR]])
    assert (body["label_token_ids"], body["score_extraction_token"]) == (LABELS, "<s>")


@pytest.mark.parametrize("answer", [[], [[[0.9, 0.1]]], [[[0.9], [0.2]]]])
async def test_scores_that_are_missing_are_a_labelled_failure_and_no_zero(tmp_path, answer):
    async with scored_by(answer, tmp_path) as (scorer, _):
        (found,) = await score(scorer, make_request("a\n\nbc"))
    assert (found.value, found.failure) == (None, DropReason.REWARD_FAILED)
    assert "2 steps were asked for" in found.detail
