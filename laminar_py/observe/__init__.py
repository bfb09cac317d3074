"""Figures, pages, samples and trackers of a run, read from its record."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.observe.fleet import pss_bytes as pss_bytes
    from laminar_py.observe.fleet import watch_fleet as watch_fleet
    from laminar_py.observe.kit import Card as Card
    from laminar_py.observe.kit import Chart as Chart
    from laminar_py.observe.kit import Panel as Panel
    from laminar_py.observe.kit import Series as Series
    from laminar_py.observe.kit import Table as Table
    from laminar_py.observe.kit import render as render
    from laminar_py.observe.live import make_view as make_view
    from laminar_py.observe.mean_step import StageTimes as StageTimes
    from laminar_py.observe.mean_step import StepStage as StepStage
    from laminar_py.observe.mean_step import compose as compose
    from laminar_py.observe.quality import REWARD_STEPS as REWARD_STEPS
    from laminar_py.observe.quality import Point as Point
    from laminar_py.observe.quality import count_devices as count_devices
    from laminar_py.observe.quality import device_seconds as device_seconds
    from laminar_py.observe.quality import measure_quality as measure_quality
    from laminar_py.observe.quality import read_curves as read_curves
    from laminar_py.observe.quality import tell_mean as tell_mean
    from laminar_py.observe.record import Costs as Costs
    from laminar_py.observe.record import read_costs as read_costs
    from laminar_py.observe.record import read_snapshot as read_snapshot
    from laminar_py.observe.record import read_steps as read_steps
    from laminar_py.observe.remedies import Wall as Wall
    from laminar_py.observe.report import RunReport as RunReport
    from laminar_py.observe.sample_reader import list_samples as list_samples
    from laminar_py.observe.sample_reader import read_sample as read_sample
    from laminar_py.observe.samples import SampleOrder as SampleOrder
    from laminar_py.observe.stats import Stats as Stats
    from laminar_py.observe.stats import Totals as Totals
    from laminar_py.observe.summary import Summary as Summary
    from laminar_py.observe.summary import summarise as summarise
    from laminar_py.observe.tails import Measure as Measure
    from laminar_py.observe.trajectories import Trajectories as Trajectories
else:
    __getattr__ = public_names(__name__)
