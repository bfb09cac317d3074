"""Counters, live view and summary of a running run, and its figures for trackers. The controller feeds it."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.observe.fleet import folder_bytes as folder_bytes
    from laminar_py.observe.fleet import watch_fleet as watch_fleet
    from laminar_py.observe.live import Pace as Pace
    from laminar_py.observe.live import View as View
    from laminar_py.observe.stats import Stats as Stats
    from laminar_py.observe.stats import Totals as Totals
    from laminar_py.observe.stats import replay_figures as replay_figures
    from laminar_py.observe.summary import CheckpointFigures as CheckpointFigures
    from laminar_py.observe.summary import EvaluationFigures as EvaluationFigures
    from laminar_py.observe.summary import RelayFigures as RelayFigures
    from laminar_py.observe.summary import Summary as Summary
    from laminar_py.observe.summary import summarise as summarise
    from laminar_py.observe.trackers import flat_row as flat_row
else:
    __getattr__ = public_names(__name__)
