"""Laws of the math verifier: what counts as the answer, and how numbers are compared."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_contrib.mathematics.extraction import MAX_ANSWER, MAX_RESPONSE, extract_answer
from laminar_contrib.mathematics.verify import MathOutcome, MathVerdict, check_reference, verify
from tests.depth import examples

LATEX = (
    r"\frac \boxed{ \text{ \begin{pmatrix} \end{pmatrix} \left( \right] \{ \} { } ( ) [ ] | $ \\ & , ; : = < >"
    r" \le \in \cup \setminus \pm \sqrt \sin \log _ ^ ! + - * / % ° 0 1 7 12 3.50 .5 1,234 x y_1 e i"
    r" \pi \infty and or cm \overline{3} ... \mathbb{R} \circ </think> <answer> answer is"
)
PIECES = st.sampled_from(LATEX.split(" "))
UNHURRIED = settings(deadline=None)
FRACTIONS = st.fractions(max_denominator=10**9)


def boxed(text):
    return f"Therefore it is $\\boxed{{{text}}}$."


def is_right(answer, reference):
    return verify(boxed(answer), reference).outcome is MathOutcome.RIGHT


@UNHURRIED
@given(st.text(max_size=200), st.text(max_size=40))
def test_no_text_raises(response, reference):
    assert isinstance(verify(response, reference), MathVerdict)
    check_reference(reference)


@settings(UNHURRIED, max_examples=examples(300))
@given(st.lists(PIECES, max_size=12), st.lists(PIECES, max_size=6))
def test_no_latex_raises(answer, reference):
    assert isinstance(verify(boxed(" ".join(answer)), " ".join(reference)), MathVerdict)


@UNHURRIED
@given(FRACTIONS, FRACTIONS)
def test_fractions_are_right_exactly_where_they_are_equal(one, other):
    text = rf"\frac{{{one.numerator}}}{{{one.denominator}}}"
    assert is_right(text, f"{one.numerator}/{one.denominator}")
    assert is_right(text, f"{other.numerator}/{other.denominator}") is (one == other)


@UNHURRIED
@given(st.integers(-(10**30), 10**30), st.integers(-3, 3))
def test_whole_numbers_are_exact(number, more):
    assert is_right(f"{number:,}", str(number + more)) is (more == 0)


@UNHURRIED
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.randoms())
def test_a_set_has_no_order_and_a_point_has_one(numbers, draw):
    mixed = numbers[:]
    draw.shuffle(mixed)
    first, second = (", ".join(map(str, each)) for each in (numbers, mixed))
    assert is_right(rf"\{{{first}\}}", rf"\{{{second}\}}")
    assert is_right(first, second)
    assert is_right(f"({first})", f"({second})") is (numbers == mixed)


@UNHURRIED
@given(st.decimals(-1000, 1000, places=3))
def test_a_decimal_is_the_fraction_that_it_is_and_no_other(number):
    thousandths = int(number * 1000)
    assert is_right(str(number), rf"\frac{{{thousandths}}}{{1000}}")
    assert not is_right(str(number), rf"\frac{{{thousandths + 1}}}{{1000}}")


@pytest.mark.parametrize("exponent", [10, 99, 300])
def test_numbers_close_to_each_other_or_to_zero_are_told_apart(exponent):
    assert not is_right(rf"\frac{{1}}{{2^{{{exponent}}}}}", rf"\frac{{1}}{{2^{{{exponent - 1}}}}}")
    assert not is_right(f"10^{{{exponent}}}+1", f"10^{{{exponent}}}")
    assert not is_right(f"10^{{-{exponent}}}", "0")


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("0.3333", r"\frac{1}{3}"), ("3.464", r"2\sqrt{3}"), ("3.14159", r"\pi"), ("33.33\\%", r"\frac{1}{3}")],
)
def test_a_decimal_that_only_rounds_the_number_is_wrong_unless_approximations_are_allowed(answer, reference):
    assert not is_right(answer, reference)
    assert verify(boxed(answer), reference, approximate=True).outcome is MathOutcome.RIGHT


@pytest.mark.parametrize("answer", ["0.333", "0.3334", "0.33", "0.33334"])
def test_an_approximation_has_four_digits_and_all_of_them_are_right(answer):
    assert verify(boxed(answer), r"\frac{1}{3}", approximate=True).outcome is MathOutcome.WRONG


def test_a_reference_of_four_digits_says_how_many_are_wanted():
    assert is_right(r"\pi", "3.1416")
    assert is_right("3.14159", "3.1416")
    assert not is_right("3.142", "3.1416")


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("[0,100]", "100"),
        ("0,125", "125"),
        ("(3,100)", "3100"),
        ("0,500", "500"),
        ("(1,200)", "1200"),
        (r"\{1,250\}", "1250"),
        ("3{,}5", "3.5"),
        ("3{,}100", "(3,100)"),
        ("1, 234", "1,234"),
        ("1,2,300", "12300"),
        ("(A)(B)", "A"),
        ("1011", "1011_2"),
        ("g(t)=t^2", "f(x)=x^2"),
        ("x^2+x", "x^2+C"),
        ("x=1,y=2", "x=1,x=2"),
        (r"x \in \{1, 2\}", "x=1,y=2"),
        (r"x=1\text{ or }x=2", "x=1,y=2"),
        (r"2k, k\in\mathbb{N}", r"2k, k\in\mathbb{Z}"),
        (r"\frac12 3", r"\frac{12}{3}"),
        ("(A) 5 (B) 6", "A"),
    ],
)
def test_a_text_is_read_only_as_what_it_can_mean(answer, reference):
    assert not is_right(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        (r"\frac{1,234}{2}", "617"),
        ("9_{10}", "9"),
        ("1011_2", "1011"),
        ("f(t)=t^2", "f(x)=x^2"),
        ("x^2+K", "x^2+C"),
        (r"\text{14 March}", r"\text{March 14th}"),
        (r"2k, k\in\mathbb{Z}", r"2n, n\in\mathbb{Z}"),
        ("(B) P(A)", "B"),
        (r"4^{\text{th}}", "4"),
        ("x^12", "x^{12}"),
        (r"\frac{-b+\sqrt{b^2-4ac}}{2a}", r"\frac{\sqrt{b^2-4ac}-b}{2a}"),
    ],
)
def test_writings_of_one_answer_are_equal(answer, reference):
    assert is_right(answer, reference)


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("#### 42\nThis result is exact.", "42"),
        ("**Answer:** 42\n\nThis solution is valid.", "42"),
        ("The answer is 42. This result is correct.", "42"),
        ("<answer>12</answer> I am sure the answer is good.", "12"),
        (r"\boxed{42} #### 41", "41"),
        (r"\boxed{42} Answer: see above.", "42"),
        (r"\boxed{17} and an empty box \boxed{}", "17"),
        ("The correct answer is (D) $2\\sqrt{3}$.", "D"),
        ("The value of $x$ is **-4**.", "-4"),
        (r"The angle is $\boxed{60}$ radians.", r"60\text{ rad}"),
        ("\\boxed{42}\n\n#### 4. Check\nAll holds.", "42"),
        (r"\boxed{42} **Explanation of the answer:** We multiply 6 by 7.", "42"),
        ("#### Step 1: add\nThat is 7.\n#### Conclusion\nThe answer is 14.", "14"),
        ("#### Final Answer\n14", "14"),
        ("#### yes\nThat is all.", "yes"),
        ("<answer>Final answer: 14</answer>", "14"),
        ("Answer: **x**2+1**", "x^2+1"),
        ("The answer is $7$ million.", "7000000"),
        ("Answer: -$7$", "-7"),
        ("The answer is $7$ cm.", "7 cm"),
        ("Answer: the side that is not parallel is $7$.", "7"),
        ("So she has 7 more apples.", "7"),
        ("From which we get $x = 7$.", "7"),
    ],
)
def test_the_last_mark_with_a_value_counts_before_any_prose(response, reference):
    assert verify(response, reference).outcome is MathOutcome.RIGHT


@pytest.mark.parametrize(
    "response",
    [
        "The answer is not $7$.",
        "The answer is not equal to $7$.",
        "The answer is less than $7$.",
        "The answer is twice $7$.",
        "The answer is $7$ times $2$.",
        "The answer is $7$ dozen.",
        "Answer: -$7$",
        "Answer: $7$ to $9$",
        "Answer: $7$/$9$",
        "<answer>at least $7$</answer>",
        "Thus $7$ is not possible.",
        "So there are more than $7$.",
        "It is more than **7**.",
        "There are at least 7 of them.",
    ],
)
def test_a_value_that_the_words_around_it_change_is_not_the_answer(response):
    assert verify(response, "7").outcome is not MathOutcome.RIGHT


@pytest.mark.parametrize("place", [r"$\boxed{7}$", "The answer is $7$"])
def test_a_unit_behind_a_value_counts(place):
    assert verify(f"{place} km/h.", r"7\text{ m/s}").outcome is MathOutcome.WRONG


@pytest.mark.parametrize(
    "answer", ["99999999!", "9^{9^{9^9}}", "2^{2^{40}}", r"\binom{10^9}{10^8}", "10^{10^{10}}!"]
)
def test_numbers_too_large_are_not_worked_out_but_equal_to_themselves(answer):
    verdict = verify(boxed(answer), "7")
    assert (verdict.outcome, verdict.reason) == (MathOutcome.UNPARSABLE, "a number too large to be worked out")
    assert is_right(answer, answer)


@pytest.mark.parametrize(
    "text", ["(" * 500, "-" * 900, "^2" * 300, "!" * 400, r"\frac" * 150, r"\text{" * 200 + "}" * 200]
)
def test_deep_nesting_ends_as_unparsable(text):
    assert verify(boxed("x" + text), "7").outcome is not MathOutcome.RIGHT


@UNHURRIED
@given(st.text("ab {}$\\", max_size=40))
def test_thoughts_are_not_looked_at(thoughts):
    response = rf"<think>{thoughts} \boxed{{1}} {thoughts}</think> The answer is \boxed{{2}}."
    assert extract_answer(response) == "2"
    assert extract_answer(rf"<think>{thoughts} \boxed{{1}}") is None


@pytest.mark.parametrize(
    "piece",
    ["answer: ", "the answer is ", "#### ", r"\\[ ", "$$ ", r"\\boxed{", "**a** ", "1,", "(", "answer is $"],
)
def test_the_cost_of_a_degenerate_response_is_bounded(piece):
    started = time.process_time()
    verify(piece * (MAX_RESPONSE // len(piece)), "7")
    assert time.process_time() - started < 3


def test_no_more_than_the_end_of_a_response_and_short_answers_are_looked_at():
    assert extract_answer(r"\boxed{1}" + " " * MAX_RESPONSE + "no number") is None
    assert extract_answer(boxed("1" * (MAX_ANSWER + 1))) is None
    assert extract_answer(boxed("1" * MAX_ANSWER)) == "1" * MAX_ANSWER


@pytest.mark.parametrize(
    ("outcome", "response", "reference"),
    [
        (MathOutcome.RIGHT, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (MathOutcome.WRONG, r"\boxed{\frac{1}{3}}", r"\frac{1}{2}"),
        (MathOutcome.UNPARSABLE, "No idea.", r"\frac{1}{2}"),
        (MathOutcome.UNPARSABLE, "There are 10 people in the problem, but I cannot solve it.", "10"),
        (MathOutcome.UNPARSABLE, r"\boxed{\frac{1}{}}", r"\frac{1}{2}"),
    ],
)
def test_wrong_and_unparsable_are_told_apart(outcome, response, reference):
    assert verify(response, reference).outcome is outcome


def test_an_inequality_of_complex_numbers_is_wrong_and_raises_nothing():
    assert verify(boxed("i < ax"), "ax < i").outcome is MathOutcome.WRONG


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("", "the reference answer is empty"),
        (r"\frac{1}{", "cannot be read"),
        ("1 +", "cannot be read"),
        ("9" * 2000, "2000 characters"),
        ("99999999!", "too large"),
    ],
)
def test_a_reference_that_cannot_be_compared_with_is_complained_of_in_a_line(reference, complaint):
    said = check_reference(reference)
    assert said is not None
    assert complaint in said
    assert "\n" not in said
