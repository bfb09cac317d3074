"""docs/adapters.md: its config and its line are read, its program is one, and its links lead to files."""

import json
import re

import yaml
from pydantic import TypeAdapter

from laminar_py.config.environment import AnyEnvironmentConfig
from laminar_py.config.reward import RewardConfig
from tests.runs.runs import REPO

PAGE = (REPO / "docs/adapters.md").read_text()


def block(kind):
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)
    return found


def test_the_config_is_that_of_an_agent():
    config = yaml.safe_load(block("yaml"))
    assert TypeAdapter(AnyEnvironmentConfig).validate_python(config["environment"]).kind == "agent"
    assert RewardConfig.model_validate_json(json.dumps(config["reward"])).use


def test_the_program_reads_the_field_that_the_line_has():
    compile(block("python"), "play.py", "exec")
    (field,) = re.findall(r'\["fields"\]\["(\w+)"\]', block("python"))
    assert field in json.loads(block("json"))


def test_links_lead_to_files():
    for link in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (REPO / "docs" / link).is_file(), link
