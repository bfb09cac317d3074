"""The fit: it finds what times were made of, and gives nothing a negative share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_lab.calibration.fit import TimedShape, fit

SHAPES = [(1, n, n * length) for n in (1, 8, 64) for length in (10, 400, 3000)]
Share = st.floats(1e-6, 1.0) | st.just(0.0)


def observed(coefficients, shapes=SHAPES):
    times = [sum(c * t for c, t in zip(coefficients, terms, strict=True)) for terms in shapes]
    return [TimedShape(str(terms), terms, seconds) for terms, seconds in zip(shapes, times, strict=True)]


@given(st.floats(1e-3, 1.0), Share, Share)
def test_times_without_noise_give_back_their_coefficients(first, second, third):
    coefficients = (first, second * 1e-3, third * 1e-6)
    found = fit(observed(coefficients))
    assert found.coefficients == pytest.approx(coefficients, rel=1e-5, abs=1e-9)
    assert found.worst_error < 1e-6


@given(st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9))
def test_no_coefficient_is_negative_and_no_term_alone_fits_better(noise):
    exact = observed((0.02, 3e-5, 8e-8))
    noisy = [TimedShape(o.name, o.terms, o.seconds * factor) for o, factor in zip(exact, noise, strict=True)]
    found = fit(noisy)
    assert min(found.coefficients) >= 0
    lost = sum(error**2 for error in found.errors)
    for place in range(3):
        alone = fit([TimedShape(o.name, (o.terms[place],), o.seconds) for o in noisy])
        assert lost <= sum(error**2 for error in alone.errors) + 1e-9


def test_a_time_that_falls_with_a_term_leaves_the_term_out():
    falling = [TimedShape(str(n), (1, n), 1.0 - n / 100) for n in (1, 2, 3)]
    assert fit(falling).coefficients[1] == 0
