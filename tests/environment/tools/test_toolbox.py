"""Tools by name, and mistakes in a config, each told in one line."""

import pytest
from pydantic import ValidationError

from laminar_contrib.tools.call_formats import CallFamily
from laminar_contrib.tools.kind import ToolSettings
from laminar_contrib.tools.tool_environment import CallTurns, load_tools
from laminar_py.config.section import ConfigError


@pytest.mark.parametrize(
    ("use", "family", "fault"),
    [
        (["abacus"], "hermes", "tools.use=abacus: no such tool; write calculator, search, python or path/to"),
        (["none.py:add"], "hermes", "tools.use=none.py:add: no such file as none.py; name a Python file"),
        (["{own}:nothing"], "hermes", "tools.use={own}:nothing: {own} defines no function 'nothing'; define it"),
        (["{own}:last"], "hermes", "tools.use={own}:last: {own} defines no function 'last'; "),
        (["{own}:untyped"], "hermes", "tools.use={own}:untyped: argument a has no type; annotate it, e.g. a: str"),
        (["{own}:add", "{own}:add"], "hermes", "tools.use={own}:add: another tool is named add; rename one"),
        (
            ["{own}:two"],
            "tags",
            "tools.family=tags: two has no argument or several, and a tag gives one; give all",
        ),
        (
            ["{own}:none"],
            "tags",
            "tools.family=tags: none has no argument or several, and a tag gives one; give all",
        ),
    ],
)
def test_a_tool_that_cannot_be_had_is_explained_in_one_line(own_tools, use, family, fault):
    with own_tools.open("a") as file:
        file.write("\ndef two(a: int, b: int): ...\n\ndef none(): ...\n")
    settings = ToolSettings(use=[given.format(own=own_tools) for given in use], family=CallFamily(family))
    with pytest.raises(ConfigError) as caught:
        CallTurns(settings, load_tools(settings))
    assert str(caught.value).startswith(fault.format(own=own_tools))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"use": []}, "at least 1 item"),
        ({"use": ["search"]}, "tools.corpus: is not set, and tools.use has search; name a file"),
        ({"use": ["calculator"], "result_form": "x"}, "tools.result_form=x: write {} once"),
        ({"use": ["calculator"], "result_form": "{}{}"}, "tools.result_form={}{}: write {} once"),
        ({"use": ["calculator"], "family": "smoke"}, "'hermes', 'llama' or 'tags'"),
        ({"use": ["calculator"], "most_calls": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, fault):
    with pytest.raises(ValidationError) as caught:
        ToolSettings.model_validate(settings, strict=False)
    assert fault in str(caught.value)


def test_search_is_a_tool_like_others(tmp_path):
    pytest.importorskip("bm25s")
    (tmp_path / "corpus.txt").write_text("Paris is in France.\n\nRome is in Italy.")
    tools = load_tools(ToolSettings(use=["search"], corpus=tmp_path / "corpus.txt"))
    definition = tools["search"].definition
    assert list(definition["function"]["parameters"]["properties"]) == ["query"]
