"""Texts that a run sampled, from its record and its tokenizer."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.observe.samples.reading import list_samples as list_samples
    from laminar_py.observe.samples.reading import read_sample as read_sample
    from laminar_py.observe.samples.records import SampleOrder as SampleOrder
else:
    __getattr__ = public_names(__name__)
