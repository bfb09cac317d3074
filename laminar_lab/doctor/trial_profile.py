"""The profile of `laminar doctor --try`: rates of a trial, for the whole model of its config. Pure.

The trial's model may have fewer layers than the config's. Then times grow with bytes or FLOPs, and the field is
extrapolated. A field that no row of the self-test measured has the planner's assumption, or is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from laminar_lab.calibration.profile import EMBEDDED, EMBEDDED_RESERVE
from laminar_lab.doctor.trial_rows import WEIGHTY, TriedRow, Verdict
from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.gpus import gpu_of_device
from laminar_lab.model_shape import ModelShape
from laminar_lab.plan.known_models import shape_at
from laminar_lab.step_time import (
    LOAD_BYTES_PER_S,
    PUBLISH_BYTES_PER_S,
    RESERVE_TOKENS,
    engine_times,
    learner_times,
)
from laminar_py.config import ConfigError, RunConfig
from laminar_py.records.host import counted

FORWARD = 3.0  # FLOPs of forward and backward pass, over forward alone


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialModel:
    """The model of a trial, e.g. `TrialModel(shape=shape, num_bytes=3_100_000_000, token_s=0.004)`."""

    shape: ModelShape
    num_bytes: int  # of a version
    token_s: float  # median over responses, from submission to end, for each of their tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """Rows of a self-test, and facts for its profile that no row has."""

    rows: Sequence[TriedRow]
    gpu: str = ""  # name of the engines' GPUs, by their driver
    learner_nodes: int = 1
    model: TrialModel | None = None  # None: the trial failed, or its family has no formula

    @property
    def failed(self) -> bool:
        """Whether a part failed."""
        return any(row.verdict is Verdict.FAILED for row in self.rows)


class Basis(StrEnum):
    """Sources of a profile's field."""

    MEASURED = "measured"
    EXTRAPOLATED = "extrapolated"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class ProfileField:
    """A field of the profile, e.g. `ProfileField("engine.load_s", 3.6, Basis.EXTRAPOLATED, "from 2 layers")`."""

    name: str  # with its section
    value: float
    basis: Basis
    how: str


def profile_of(config: RunConfig, found: SelfTest) -> tuple[EmulationProfile, list[ProfileField]]:
    """Return the profile of a self-test, and the source of each measured or computed field.

    Raises `ConfigError` if the trial's model has no formula.
    """
    shape = shape_at(config.model.path)
    if found.model is None or shape is None:
        raise ConfigError(
            f"model.path={config.model.path}: no formula knows its size, which a profile needs; measure it with"
            " laminar calibrate"
        )
    fields = list(_Fields(config, found, found.model, shape).all())
    tree: dict[str, dict[str, object]] = {"engine": {}, "learner": {}, "": {}}
    for field in fields:
        section, _, name = field.name.rpartition(".")
        tree[section][name] = field.value
    lora = config.learner.lora
    sizes = {
        "num_parameters": shape.total,
        "num_active": shape.active,
        "hidden_size": shape.hidden_size,
        "num_layers": shape.num_hidden_layers,
        "adapters": 0 if lora is None else shape.adapters(lora),
    }
    served = config.rollout.engine
    reserve = EMBEDDED_RESERVE if served.kind == EMBEDDED else RESERVE_TOKENS
    engine = tree["engine"] | {"reserve_tokens": reserve, "gpus": max(1, served.gpus)}
    whole = {"engine": engine, "learner": tree["learner"] | sizes} | tree[""]
    return EmulationProfile.model_validate(whole), fields


class _Fields:
    """Fields of one profile, from a trial of `model` for the model of `shape`."""

    def __init__(self, config: RunConfig, found: SelfTest, model: TrialModel, shape: ModelShape) -> None:
        self._config, self._found, self._model, self._shape = config, found, model, shape
        self._values: Mapping[str, float | None] = {row.what: row.value for row in found.rows}
        self._is_whole = shape == model.shape
        self._basis = Basis.MEASURED if self._is_whole else Basis.EXTRAPOLATED
        self._flops = model.shape.active / shape.active  # of a token, tried over whole
        lora = config.learner.lora
        grown = (
            shape.total / model.shape.total if lora is None else shape.adapters(lora) / model.shape.adapters(lora)
        )
        self._num_bytes = model.num_bytes * grown  # of the whole model's versions

    def all(self) -> Iterator[ProfileField]:
        """Yield each field."""
        yield from self._engine()
        yield from self._learner()
        if (relay := self._rate("versions to nodes")) is not None:
            yield ProfileField("relay_bytes_per_s", relay, Basis.MEASURED, f"versions to nodes{self._by()}")
        rings = [
            value for what in ("all-reduce", "reduce-scatter") if (value := self._values.get(what)) is not None
        ]
        if rings:
            name = "link_bytes_per_s" if self._found.learner_nodes == 1 else "network_bytes_per_s"
            yield ProfileField(name, min(rings), Basis.MEASURED, "the slower of all-reduce and reduce-scatter")

    def _engine(self) -> Iterator[ProfileField]:
        gpus, shape = max(1, self._config.rollout.engine.gpus), self._shape
        gpu = gpu_of_device(self._found.gpu)
        if gpu is not None:
            times = engine_times(shape, gpu, tensor_parallel=gpus)
            for name in ("step_s", "sequence_s", "kv_token_s", "prefill_tokens_per_s"):
                yield ProfileField(
                    f"engine.{name}", getattr(times, name), Basis.ASSUMED, f"data sheet of {gpu.name}"
                )
        else:
            step_s = self._model.token_s / self._flops
            yield ProfileField(
                "engine.step_s", step_s, self._basis, f"a token of the trial's batch{self._by('FLOPs')}"
            )
            yield ProfileField(
                "engine.kv_token_s", 0.0, Basis.ASSUMED, "part of step_s; laminar calibrate measures it"
            )
            prefill = FORWARD * self._trained_per_s
            how = f"{FORWARD:g} x the learner's tokens a second"
            yield ProfileField("engine.prefill_tokens_per_s", prefill, Basis.EXTRAPOLATED, how)
        yield self._moved("engine.load_s", "loads", self._num_bytes / gpus, LOAD_BYTES_PER_S)
        if (start_s := self._values.get("engines start")) is not None:
            yield ProfileField("engine.start_s", start_s, self._basis, f"engines start{self._by()}")

    def _learner(self) -> Iterator[ProfileField]:
        how = f"learner step, {counted(self._config.learner.world_size, 'rank')}{self._by('FLOPs')}"
        yield ProfileField("learner.train_tokens_per_s", self._trained_per_s, self._basis, how)
        gpu = gpu_of_device(self._found.gpu)
        if self._is_whole or gpu is None:
            yield ProfileField("learner.optimizer_s", 0.0, self._basis, "part of train_tokens_per_s")
        else:
            lora = self._config.learner.lora
            adapters = 0 if lora is None else self._shape.adapters(lora)
            optimizer_s = learner_times(self._shape, gpu, adapters=adapters).optimizer_s
            yield ProfileField("learner.optimizer_s", optimizer_s, Basis.ASSUMED, f"data sheet of {gpu.name}")
        yield self._moved("learner.publish_s", "publish", self._num_bytes, PUBLISH_BYTES_PER_S)

    def _by(self, unit: str = "") -> str:
        """Return how a figure of few layers grows to all of them; "" if the trial had all."""
        if self._is_whole:
            return ""
        tried, layers = self._model.shape.num_hidden_layers, self._shape.num_hidden_layers
        return f", {tried} of {layers} layers{unit and f', grown by {unit}'}"

    @property
    def _trained_per_s(self) -> float:
        value = self._values.get("learner step")
        assert value is not None, "a trial that ended well has a learner step"
        return value * self._flops / self._config.learner.world_size

    def _moved(self, name: str, what: str, num_bytes: float, assumed: float) -> ProfileField:
        """Return the seconds of `num_bytes` at a row's rate.

        A publish of few bytes counts at the rate of copies out of a GPU; else the planner's assumption holds.
        """
        rate, basis, how = self._rate(what), self._basis, f"{what}{self._by('bytes')}"
        if rate is None and what == "publish" and (rate := self._values.get("GPU to host")) is not None:
            basis, how = Basis.EXTRAPOLATED, "GPU to host: the trial's version is too small"
        if rate is None:
            rate, basis, how = assumed, Basis.ASSUMED, f"{assumed / 1e9:g} GB/s, by laminar plan"
        return ProfileField(name, num_bytes / rate, basis, how)

    def _rate(self, what: str) -> float | None:
        """Return a row's bytes per second; None if a part of the model had too few bytes to say so."""
        return self._values.get(what) if self._is_whole or self._model.num_bytes >= WEIGHTY else None
