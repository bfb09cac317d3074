"""Figures, pages, samples and trackers of a run, read from its record."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.observe.diagnosis import Bottleneck as Bottleneck
    from laminar_py.observe.diagnosis import Diagnosis as Diagnosis
    from laminar_py.observe.diagnosis import without_bottleneck as without_bottleneck
    from laminar_py.observe.figures import FIGURES as FIGURES
    from laminar_py.observe.fleet import pss_bytes as pss_bytes
    from laminar_py.observe.fleet import watch_fleet as watch_fleet
    from laminar_py.observe.kit import Card as Card
    from laminar_py.observe.kit import Chart as Chart
    from laminar_py.observe.kit import Panel as Panel
    from laminar_py.observe.kit import Series as Series
    from laminar_py.observe.kit import Table as Table
    from laminar_py.observe.kit import render as render
    from laminar_py.observe.live import View as View
    from laminar_py.observe.mean_step import MeanStep as MeanStep
    from laminar_py.observe.mean_step import StageTimes as StageTimes
    from laminar_py.observe.mean_step import StepStage as StepStage
    from laminar_py.observe.mean_step import compose as compose
    from laminar_py.observe.mean_step import predict as predict
    from laminar_py.observe.record import read_snapshot as read_snapshot
    from laminar_py.observe.record import read_steps as read_steps
    from laminar_py.observe.record import summary_seconds as summary_seconds
    from laminar_py.observe.report import RunReport as RunReport
    from laminar_py.observe.report import read_report as read_report
    from laminar_py.observe.samples import SampleOrder as SampleOrder
    from laminar_py.observe.samples import list_samples as list_samples
    from laminar_py.observe.samples import read_sample as read_sample
    from laminar_py.observe.stats import Stats as Stats
    from laminar_py.observe.stats import Totals as Totals
    from laminar_py.observe.summary import LengthFigures as LengthFigures
    from laminar_py.observe.summary import Summary as Summary
    from laminar_py.observe.summary import summarise as summarise
    from laminar_py.observe.tails import NAMES as NAMES
    from laminar_py.observe.tails import Measure as Measure
    from laminar_py.observe.tails import format_seconds as format_seconds
    from laminar_py.observe.terminal import make_table as make_table
    from laminar_py.observe.trajectories import Trajectories as Trajectories
else:
    __getattr__ = public_names(__name__)
