"""Parts of the tests: each test is in one of them, and no part of SGLang's files is empty."""

from dataclasses import dataclass

import pytest

from tests.conftest import in_part


@dataclass(frozen=True)
class Item:
    """A collected test."""

    nodeid: str
    sglang: bool = False

    @property
    def location(self):
        return (self.nodeid.partition("::")[0],)

    def get_closest_marker(self, name):
        return self.sglang and name == "sglang"


ITEMS = [Item(f"tests/test_{file}.py::test_{place}", sglang=file < 11) for file in range(30) for place in range(9)]


@pytest.mark.parametrize("number", [1, 5, 11, 12])
def test_each_test_is_in_one_part_and_tests_of_a_server_stay_together(number):
    parts = [in_part(ITEMS, index, number) for index in range(min(number, 11))]
    for item in ITEMS[:99]:
        (one,) = [part for part in parts if item in part]
        assert {other for other in ITEMS[:99] if other.location == item.location} <= one
    every = [in_part(ITEMS, index, number) for index in range(number)]
    assert all(any(item.sglang for item in part) for part in every)
    assert sorted(item.nodeid for part in every for item in part if not item.sglang) == sorted(
        item.nodeid for item in ITEMS if not item.sglang
    )
