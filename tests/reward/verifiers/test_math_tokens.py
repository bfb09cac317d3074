"""Tokens of an answer and the expressions that a parser reads from them."""

import pytest

from laminar_contrib.mathematics.expressions import UnreadableError, parse_expression, tokenise
from laminar_contrib.mathematics.words import normalise


def texts(text):
    return [token.text for token in tokenise(normalise(text))]


@pytest.mark.parametrize("text", [r"\left( x \, + 1 \right)", r"( x+1 )", r"\displaystyle (x + 1)"])
def test_layout_makes_no_token(text):
    assert texts(text) == texts("(x+1)")


@pytest.mark.parametrize("text", ["(x-1)", "x+1", "(x+1)!", "(x+1)+", "[x+1]"])
def test_another_sign_makes_another_token(text):
    assert texts(text) != texts("(x+1)")


@pytest.mark.parametrize("text", ["3 3", "f(x+y)", "x +", "x + 1 )"])
def test_an_expression_of_two_readings_or_with_unused_tokens_is_refused(text):
    with pytest.raises(UnreadableError):
        parse_expression(tokenise(normalise(text)))
