"""The page of a plan in a real browser: every panel is drawn, nothing is asked of the network."""

import json

import pytest

from laminar_lab.plan.page import make_page, write_page
from laminar_lab.plan.planner import make_plan
from tests.plan.builders import make_request
from tests.report.browser import browsing, slow_in_browser

DRAWN = """JSON.stringify(Object.fromEntries(['by-staleness', 'by-gpus', 'stages', 'memory'].map((id) => [
  id, document.querySelectorAll(`#${id} .trace`).length])))"""


@pytest.fixture(scope="module")
def plan():
    return make_plan(make_request(model="</script><b>x", nodes=1, prompts_per_step=8, group_size=8, price=2.0))


@slow_in_browser
async def test_the_page_draws_every_trade_off_and_asks_no_network(plan, tmp_path):
    write_page(plan, tmp_path / "plan.html")
    async with browsing(tmp_path / "profile") as tab:
        await tab.do("Page.navigate", url=(tmp_path / "plan.html").as_uri())
        await tab.until("window.laminar !== undefined && document.querySelectorAll('#memory .trace').length > 0")
        drawn = json.loads(await tab.look(DRAWN))
        assert drawn["by-staleness"] == 4, "three schedules, and the line by formula"
        assert drawn["by-gpus"] == 2
        assert drawn["stages"] == 4
        assert drawn["memory"] >= 8
        assert await tab.look("document.getElementById('name').textContent") == "</script><b>x"
        assert await tab.look("document.documentElement.scrollWidth <= innerWidth")
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.slow
def test_a_wider_bound_and_more_gpus_never_give_less_by_formula(plan):
    page = make_page(plan)
    for trade_offs in (page.by_bound[2:], page.by_gpus):
        rates = [one.tokens_per_s for one in trade_offs]
        assert rates == sorted(rates)
