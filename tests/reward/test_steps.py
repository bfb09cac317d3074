"""Process rewards of a model on a server: steps, separators, credit; before a server that answers as SGLang."""

import math
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from laminar_contrib.reward_models.steps import minimum_rewards, separated, step_ends
from laminar_py.records.columns import TOKEN_REWARDS
from laminar_py.records.trajectory import DropReason
from tests.reward.requests import make_request, serving
from tests.reward.test_scorer import column, score, scorer_of

SEPARATOR = 7
LABELS = [5, 6]


def ids_of(text: str) -> np.ndarray:
    return np.array([*map(ord, text)], np.int32)


def text_of(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "ends"),
    [("ab\n\ncd\n\ne", [3, 7]), ("ab\n\n", [3]), ("ab", []), ("\n\n\n\n", [1, 3]), ("a\nb", [])],
)
def test_a_finished_step_ends_with_its_text(text, ends):
    assert step_ends(ids_of(text), text_of, "\n\n") == ends


def test_an_end_in_several_tokens_counts_once():
    texts = {1: "a\n", 2: "\nb", 3: "\n", 4: "long text\n\n"}
    ids = np.array([1, 2, 3, 3, 3, 1, 3, 4], np.int32)
    assert step_ends(ids, lambda some: "".join(texts[id] for id in some.tolist()), "\n\n") == [1, 3, 6, 7]


def test_finding_steps_decodes_each_id_once_however_long_the_response():
    asked = []

    def decode(ids):
        asked.append(ids.tolist())
        return text_of(ids)

    assert step_ends(ids_of("ab\n\n" * 500), decode, "\n\n") == [*range(3, 2000, 4)]
    assert sorted(asked) == [[ord(letter)] for letter in "\nab"]


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
    """A scorer whose server gives `answer(body)`; and what the server was sent."""
    sent = []

    async def reply(request: web.Request) -> web.Response:
        sent.append(await request.json())
        return web.json_response(answer(sent[-1]))

    async with serving("/generate", reply) as url:
        term = {"kind": "steps", "urls": [url], "separator_id": SEPARATOR, "labels": LABELS} | settings
        async with scorer_of(folder, {"use": [term]}) as scorer:
            yield scorer, sent


def good_with(*shares: float):
    """Answers as of a model that gives these to the separators of a response, in order; other places are poor."""

    def answer(body):
        ids, rows, left = body["input_ids"], [], list(shares)
        for id in ids:
            share = left.pop(0) if id == SEPARATOR else 0.01
            rows.append([[math.log(p), label, None] for p, label in zip((share, 1 - share), LABELS, strict=True)])
        rows = rows[body["logprob_start_len"] :]
        found = {"input_token_ids_logprobs": [None, *rows[:-1]], "output_token_ids_logprobs": rows[-1:]}
        return {"output_ids": [], "meta_info": found}

    return answer


@pytest.mark.parametrize(("credit", "total"), [("returns", 1.1), ("minimum", 0.2)])
async def test_each_step_is_rewarded_at_its_last_token(tmp_path, credit, total):
    async with scored_by(good_with(0.9, 0.2), tmp_path, credit=credit) as (scorer, sent):
        (found,) = await score(scorer, make_request("a\n\nbc"))
    rewards = column(tmp_path, found, TOKEN_REWARDS)
    assert rewards.nonzero()[0].tolist() == [2, 4]
    assert found.value == pytest.approx(total, abs=0.01)
    assert found.terms[0].text == "steps 0.900 0.200"
    (body,) = sent
    assert body["input_ids"] == [3, *map(ord, "a\n\n"), SEPARATOR, *map(ord, "bc"), SEPARATOR]
    assert (body["token_ids_logprob"], body["logprob_start_len"]) == (LABELS, 4)


@pytest.mark.parametrize(
    ("missing", "detail"), [("place", "the server answered 3 of 4 places"), ("label", "labels=")]
)
async def test_scores_that_are_missing_are_a_labelled_failure_and_no_zero(tmp_path, missing, detail):
    def lacking(body):
        answer = good_with(0.9, 0.2)(body)
        output = answer["meta_info"]["output_token_ids_logprobs"]
        (output if missing == "place" else output[0]).pop()
        return answer

    async with scored_by(lacking, tmp_path) as (scorer, _):
        (found,) = await score(scorer, make_request("a\n\nbc"))
    assert (found.value, found.failure) == (None, DropReason.REWARD_FAILED)
    assert detail in found.detail
