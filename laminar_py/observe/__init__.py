"""Figures, pages, samples and trackers of a run, read from its record."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.observe.fleet import pss_bytes as pss_bytes
    from laminar_py.observe.kit import Card as Card
    from laminar_py.observe.kit import Chart as Chart
    from laminar_py.observe.kit import Panel as Panel
    from laminar_py.observe.kit import Series as Series
    from laminar_py.observe.kit import Table as Table
    from laminar_py.observe.kit import render as render
    from laminar_py.observe.live import make_view as make_view
    from laminar_py.observe.sample_reader import list_samples as list_samples
    from laminar_py.observe.sample_reader import read_sample as read_sample
    from laminar_py.observe.samples import SampleOrder as SampleOrder
    from laminar_py.observe.summary import Summary as Summary
else:
    __getattr__ = public_names(__name__)
