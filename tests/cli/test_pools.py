"""Servers that `laminar reward` launches: one that does not start is one line with its last words."""

import msgspec
import pytest

from laminar_py.cli.reward import open_pools
from laminar_py.config.reward import RewardConfig
from laminar_py.config.section import ConfigError

# an interpreter whose SGLang has the right version and ends at once
FAILING = """#!/bin/sh
if [ "$1" = -c ]; then echo 0.5.23; else echo "ValueError: no weights"; exit 3; fi
"""
TERM = {"kind": "steps", "servers": "prm", "separator_id": 7, "labels": [5, 6]}


def reward_of(folder, **settings) -> RewardConfig:
    (folder / "config.json").write_text("{}")
    (folder / "python").write_text(FAILING)
    (folder / "python").chmod(0o700)
    pool = {"model": str(folder), "python": str(folder / "python"), **settings}
    return RewardConfig.model_validate_json(msgspec.json.encode({"use": [TERM], "servers": {"prm": pool}}))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"gpus": 1}, r"reward\.servers\.prm: SGLang server .* code 3; it last said: ValueError: no weights"),
        ({"gpus": 0}, r"reward\.servers\.prm\.flags\.max-total-tokens=None: on a CPU"),
    ],
)
async def test_a_server_that_does_not_start_is_one_line(tmp_path, settings, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        async with open_pools(reward_of(tmp_path, **settings), tmp_path):
            raise AssertionError("it started")
    assert "\n" not in str(caught.value)


async def test_a_reward_without_pools_launches_nothing(tmp_path):
    reward = RewardConfig.model_validate_json(b'{"use": ["math"]}')
    async with open_pools(reward, tmp_path):
        assert list(tmp_path.iterdir()) == []
