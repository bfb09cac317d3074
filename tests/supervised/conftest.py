"""A saved model, built once for the learner's tests."""

from pathlib import Path

import pytest

from tests.learner.builders import make_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")
