"""Figures over runs that differ in their seeds. Pure."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

# 0.975 quantiles of Student's t by degrees of freedom, from 1; beyond the table within 0.001
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
Z_975 = 1.96  # of the normal distribution


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % t-interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    quantile = T_975[degrees - 1] if degrees <= len(T_975) else Z_975 + 2.372 / (degrees - 1.2)
    return quantile * stdev(values) / sqrt(len(values))


def tell_mean(values: Sequence[float], *, digits: int = 3) -> str:
    """Mean and half of its 95 % t-interval, e.g. "0.412 ± 0.031"; the mean alone for one value, "–" for none."""
    if not values:
        return "–"
    half = half_width(values)
    return f"{fmean(values):,.{digits}f}" + ("" if half is None else f" ± {half:,.{digits}f}")
