"""Checks that every engine makes of a request."""

import pytest

from laminar_py.engines.checks import check_request
from laminar_py.records.engine import RefusedError
from tests.engines.engine_conformance import make_request

VOCAB = 64


@pytest.mark.parametrize("wrong", [-1, VOCAB])
@pytest.mark.parametrize("where", ["prompt", "prefix"])
def test_an_id_outside_the_vocabulary_is_refused(where, wrong):
    request = make_request(**{"prompt": [3], "prefix": [5], where: [0, wrong]})
    with pytest.raises(RefusedError, match=f"outside the vocabulary of {VOCAB}"):
        check_request(request, max_len=32, vocab=VOCAB)


def test_all_ids_of_the_vocabulary_are_taken_and_no_more_than_fit():
    check_request(make_request(prompt=range(VOCAB)), max_len=VOCAB, vocab=VOCAB)
    with pytest.raises(RefusedError, match="prompt and prefix have 65 tokens"):
        check_request(make_request(prompt=range(VOCAB), prefix=[0]), max_len=VOCAB, vocab=VOCAB)
