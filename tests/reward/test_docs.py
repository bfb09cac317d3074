"""The function of docs/rewards.md, as it stands there."""

import re
from pathlib import Path

from laminar_py.config.reward import FunctionTerm
from laminar_py.reward.terms import load_function
from tests.reward.requests import make_request

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text()


def test_the_function_on_the_page_is_a_reward(tmp_path):
    (text,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    (tmp_path / "rewards.py").write_text(text)
    score = load_function(FunctionTerm(path=f"{tmp_path / 'rewards.py'}:score"))
    totals = (b'{"total": 4}', b'{"total": 5}')
    assert [score(make_request(" 4\n", fields_json=total)) for total in totals] == [1.0, 0.0]
