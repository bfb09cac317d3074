"""Texts in a real browser: as text whatever they contain, coloured, filtered, linked, from a file or a server."""

import json

import pytest

from laminar_lab.audit.samples import read_sample
from tests.ledger.runs import open_ledger
from tests.report.browser import browsing, slow_in_browser
from tests.report.test_dashboard import command
from tests.report.test_page import local_only
from tests.report.written import EVIL, write_report, write_run
from tests.samples.runs import encode, write_sample

SHOWN = "document.getElementById('{}').textContent"
OPEN = (
    "!document.getElementById('texts-one').hidden && document.querySelector('#texts-head b').textContent === '{}'"
)
LISTED = "JSON.stringify(laminar.texts.rows.map((row) => row.id))"
NOTE = SHOWN.format("texts-note")
RUNS = """(() => {
  const runs = [];
  for (const one of document.querySelectorAll('#texts-response > span')) {
    const last = runs.at(-1), background = getComputedStyle(one).backgroundColor;
    if (last?.[0] === one.className && last[1] === background) last[2] += one.textContent.length;
    else runs.push([one.className, background, one.textContent.length]);
  }
  return JSON.stringify(runs);
})()"""
POINT = """(() => {{
  const token = document.querySelector('#texts-response [data-at="{token}"]');
  token.scrollIntoView({{ block: 'center' }});
  const [box] = token.getClientRects();
  return [box.left + box.width / 2, box.top + box.height / 2];
}})()"""


@pytest.fixture
async def run(tmp_path):
    return await write_run(tmp_path)


def as_shown(text):
    """A hostile text as the page has it: what does not print as escapes."""
    return text.replace("\u2028", "\\u2028")


async def choose(tab, **filters):
    """Set these filters, and no others, as a user does; wait for the list."""
    await tab.look(
        f"""(() => {{
          const form = document.getElementById('texts-filters');
          form.reset();
          for (const [name, value] of Object.entries({json.dumps(filters)})) form.elements[name].value = value;
          window.before = laminar.texts.rows;
          form.dispatchEvent(new Event('change'));
        }})()"""
    )
    await tab.until("window.before !== laminar.texts.rows")
    return json.loads(await tab.look(LISTED))


async def colour(tab, mode):
    await tab.look(
        "(() => { const box = document.getElementById('texts-colour');"
        f" box.value = {json.dumps(mode)}; box.dispatchEvent(new Event('change')); }})()"
    )
    return json.loads(await tab.look(RUNS))


@slow_in_browser
async def test_hostile_texts_run_no_script_and_stand_as_text(run, tmp_path):
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(f"{write_report(run).as_uri()}#sample=g0.0")
        await tab.until(OPEN.format("g0.0"))
        for place in ("texts-prompt", "texts-aside", "texts-response"):
            assert as_shown(EVIL).strip() in await tab.look(SHOWN.format(place)), place
        told = await tab.look(SHOWN.format("texts-response"))
        for escape in (
            "\\x1b[31m",
            "\\x00",
            "\\r",
            "\\x7f",
            "\\u202e",
            "\\u2066",
            "\\ufeff",
            "👩\\u200d🚀",
            "日本語",
        ):
            assert escape in told
        assert not any(character in told for character in "\x1b\x00\r\x7f\u202e\u2028\ufeff")
        assert await tab.look("document.querySelectorAll('#texts :is(script, img, b b, a)').length") == 0
        assert "p'\"<b>" in await tab.look(SHOWN.format("texts-list"))
        assert await tab.look("window.hit") is None
        await tab.look("location.hash = 'sample=g1.0'")
        await tab.until(OPEN.format("g1.0"))
        assert as_shown(EVIL) in await tab.look(SHOWN.format("texts-head"))
        assert tab.errors == []
        assert local_only(tab)


@slow_in_browser
async def test_colours_change_with_versions_or_log_probabilities_or_columns(run, tmp_path):
    spans = read_sample(run, "g0.0").spans
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(f"{write_report(run).as_uri()}#sample=g0.0")
        await tab.until(OPEN.format("g0.0"))
        by_version = json.loads(await tab.look(RUNS))
        assert [kind for kind, *_ in by_version] == ["version-0", "version-1", "version-2"]
        assert len({background for _, background, _ in by_version}) == len(spans) == 3
        assert "version 1version 2version 3" in await tab.look(SHOWN.format("texts-legend"))
        by_logprob = await colour(tab, "logprob")
        assert len({background for _, background, _ in by_logprob}) >= 3
        by_column = await colour(tab, "hints")
        assert {kind for kind, *_ in by_column} == {f"level-{level}" for level in range(1, 6)}
        plain = await colour(tab, "none")
        assert len(plain) == 1
        lengths = {sum(length for *_, length in found) for found in (by_version, by_logprob, by_column, plain)}
        assert len(lengths) == 1
        assert tab.errors == []


@slow_in_browser
async def test_pointing_at_a_token_tells_of_it(run, tmp_path):
    sample = read_sample(run, "g0.0")
    token = next(span.start for span in sample.spans if span.version == 3) + 5
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(f"{write_report(run).as_uri()}#sample=g0.0")
        await tab.until(OPEN.format("g0.0"))
        x, y = await tab.look(POINT.format(token=token))
        await tab.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await tab.until(f"{SHOWN.format('texts-readout')}.startsWith('token {token} of')")
        told = await tab.look(SHOWN.format("texts-readout"))
        assert (
            f"“{sample.tokens[token]}” · id {sample.ids[token]} · log-probability {sample.logprobs[token]:.4f}"
            in told
        )
        assert told.endswith(f"version 3 · replica 1 · hints {sample.columns['hints'][token]:g}")


@slow_in_browser
async def test_the_bytes_of_a_character_are_told_together(run, tmp_path):
    ids = read_sample(run, "g1.0").ids
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(f"{write_report(run).as_uri()}#sample=g1.0")
        await tab.until(OPEN.format("g1.0"))
        x, y = await tab.look(POINT.format(token=1))
        await tab.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await tab.until(f"{SHOWN.format('texts-readout')}.startsWith('tokens 0 to 1 of 3')")
        assert f"“é” · id {ids[0]}, {ids[1]} · " in await tab.look(SHOWN.format("texts-readout"))


@slow_in_browser
async def test_a_reports_list_is_searched_and_has_keys_and_links(run, tmp_path):
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(write_report(run).as_uri())
        await tab.until(OPEN.format("e2-heldout.0"))
        assert "4 of 6 trajectories are in this file" in await tab.look(NOTE)
        assert await choose(tab, find="dropped") == ["g1.0"]
        assert await choose(tab, find="heldout") == ["e2-heldout.0"]
        assert await choose(tab, find="training") == ["g1.0", "g0.1", "g0.0"]
        await tab.look("document.getElementById('texts-list').focus()")
        for key, id in (
            ("Home", "g1.0"),
            ("ArrowDown", "g0.1"),
            ("ArrowDown", "g0.0"),
            ("ArrowDown", "g0.0"),
            ("ArrowUp", "g0.1"),
        ):
            await tab.do("Input.dispatchKeyEvent", type="keyDown", key=key)
            await tab.until(OPEN.format(id))
        assert await tab.look("location.hash") == "#sample=g0.1"
        await tab.look("document.querySelectorAll('#texts-siblings tbody tr')[0].click()")
        await tab.until(OPEN.format("g0.0"))
        assert tab.errors == []


@slow_in_browser
async def test_a_text_that_is_not_in_the_file_is_named_in_a_line(run, tmp_path):
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(f"{write_report(run).as_uri()}#sample=e0-heldout.0")
        await tab.until(f"{NOTE}.startsWith('e0-heldout.0 is not in this file; `laminar samples ')")
        assert await tab.look("document.getElementById('texts-one').hidden")
        assert tab.errors == []


@slow_in_browser
async def test_a_prompt_has_its_history_over_training(run, tmp_path):
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(f"{write_report(run).as_uri()}#sample=e2-heldout.0")
        await tab.until("document.querySelectorAll('#texts-aside .js-line').length === 1")
        assert "has 3 visits" in await tab.look(SHOWN.format("texts-aside"))
        rows = "[...document.querySelectorAll('#texts-visits tbody tr')]"
        rewards = await tab.look(f"JSON.stringify({rows}.map((row) => row.cells[3].textContent))")
        assert json.loads(rewards) == ["1", "0.5", "0"]
        assert await tab.look("document.documentElement.scrollWidth <= innerWidth")
        assert tab.errors == []


@slow_in_browser
async def test_a_response_of_32_k_tokens_is_drawn_whole_and_told_to_its_end(tmp_path):
    run = await write_run(tmp_path, long=32_768)
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(f"{write_report(run).as_uri()}#sample=g2.0")
        await tab.until(OPEN.format("g2.0"))
        assert len(json.loads(await tab.look(RUNS))) == 1
        assert len(await colour(tab, "logprob")) > 1000
        x, y = await tab.look(POINT.format(token=32766))
        await tab.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await tab.until(f"{SHOWN.format('texts-readout')}.startsWith('token 32766 of 32,768')")
        assert tab.errors == []


@slow_in_browser
async def test_a_dashboard_lists_and_shows_what_the_server_has_and_follows_the_run(run, tmp_path):
    async with command(run) as address, browsing(tmp_path / "profile") as tab:
        await tab.open(f"{address}#sample=e0-heldout.0")
        await tab.until(OPEN.format("e0-heldout.0"))
        assert "All 6 trajectories that pass." in await tab.look(NOTE)
        assert await choose(tab, set="heldout", order="oldest") == [f"e{place}-heldout.0" for place in range(3)]
        await tab.look("document.querySelectorAll('#texts-visits tbody tr')[0].click()")
        await tab.until(f"{LISTED} === '[\"e2-heldout.0\"]'")
        assert tab.errors == []
        await tab.look(
            "document.getElementById('texts-filters').elements.step.value = 'x'; laminar.texts.refill()"
        )
        await tab.until(f"{NOTE}.startsWith('step=x: not a comparison; ')")
        assert await choose(tab) == ["e2-heldout.0", "e1-heldout.0", "e0-heldout.0", "g1.0", "g0.1", "g0.0"]
        await tab.look("window.text = document.querySelector('#texts-response span')")
        async with open_ledger(run) as ledger:
            write_sample(ledger, "g7.0", encode(tmp_path / "model", EVIL), problem="p7")
        await tab.until(f"{LISTED}.includes('g7.0')")
        assert await tab.look(OPEN.format("e0-heldout.0"))  # what is open stays as it is, scrolled as it is
        assert await tab.look("window.text === document.querySelector('#texts-response span')")
        await tab.look("location.hash = 'sample=g7.0'")
        await tab.until(OPEN.format("g7.0"))
        assert as_shown(EVIL) in await tab.look(SHOWN.format("texts-response"))
        assert await tab.look("window.hit") is None
        assert all(url.startswith((address, "data:", "blob:")) for url in tab.requests)
