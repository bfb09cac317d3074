"""Backends of inference engines: their registry, and the settings that all of them share.

A backend is a folder with a `Backend` in its `backend.py` and a line in `BACKENDS`, or an installed package with
an entry point in the group `laminar_py.backends`. The model of the backend that `kind` names validates
`rollout.engine`. Properties of that model say which resources an engine takes, so that no other room
distinguishes backends. The controller, `laminar doctor` and every node import a backend's module, so it
imports neither torch nor an HTTP client; only `open`, in the replica's process, imports the implementation.
"""

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, PlainValidator, SerializeAsAny, WithJsonSchema

from laminar_py.config.registry import Registry, named_section
from laminar_py.config.section import Section
from laminar_py.records.engine import InferenceEngine
from laminar_py.records.environment import Environments
from laminar_py.records.metrics import LearnerStarted, StepMetrics
from laminar_py.records.trajectory import MicroBatch

QUANTIZATION = "rollout.engine.quantization"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedFleet:
    """GPUs that a backend emulates: their time passes although nothing computes on them.

    E.g. `EmulatedFleet(learner_devices=8, engine_devices=1, compression=20.0, has_turns=False)`.
    """

    learner_devices: int
    engine_devices: int  # of each replica
    compression: float  # seconds of the GPUs in one second of the run
    has_turns: bool  # the backend's environments answer the turns of each trajectory


class Speculation(StrEnum):
    """Source of draft tokens that an engine verifies in one pass; see `EngineConfig.speculation`."""

    NONE = "none"
    NGRAM = "ngram"


class Quantization(StrEnum):
    """Rounding of the weights that an engine serves; see `EngineConfig.quantization`."""

    NONE = "none"
    FP8 = "fp8"
    FP8_KV = "fp8_kv"


class EngineConfig(Section):
    """Inference engines. The settings of this table belong to every backend."""

    kind: str = "local"
    """`local`: the embedded engine, in the replica's process. `sglang`: one SGLang server per replica. Or a
    backend of an installed package, such as `emulated` of laminar_lab."""
    verify_every: Annotated[int, Field(ge=0)] = 1
    """Hash the engine's own tensors after its first load and after every `verify_every` versions; they must change
    with the published files, and agree among replicas. 0: never. `sglang`: 20, since a server stands still while
    it hashes."""

    speculation: Speculation = Speculation.NONE
    """`ngram`: draft several tokens from other texts of a prompt, and verify them in one pass. `local` drafts from
    the prompt's other responses, under way and earlier, in steps that are faster by it. It samples the tokens that
    single steps sample, but for rounding, which depends on measured times, so runs repeat no longer bit by bit.
    `sglang`: the server's own n-gram drafts, on CUDA only and without `rollout.record`; not measured."""

    quantization: Quantization = Quantization.NONE
    """`fp8`: round the matrices of all layers to e4m3 at each load, which then is a whole one. `local` emulates it
    with a scale for each block of 128 x 128, and computes in the model's type. `sglang`: the server's own scales
    and kernels, for Qwen2 and Qwen3 in bf16 on CUDA; not measured. `fp8_kv`: the KV cache, too, `sglang` alone.
    The loss then corrects the mismatch: `algorithm.correction` of `none` becomes `tis` with a `proximal` policy
    that is computed, else `sequence_mask`. `max_mismatch` bounds the mismatch. `laminar eval` does not round."""
    max_mismatch: Annotated[float, Field(gt=0)] | None = None
    """With `quantization`: where the log-probabilities that engines and learner give a step's fresh tokens differ
    by more nats in the mean, the run says so in one line, and its replicas start again without quantisation, for
    good. So do 16 probes of a replica beyond half a nat. A resume keeps that, unless it names a bound above the
    mismatch on record. None: 0.05 if all compute in fp32 on CPUs, else 0.1."""

    @property
    def quantizes(self) -> bool:
        """True where engines serve rounded weights."""
        return self.quantization is not Quantization.NONE

    @property
    def drafts_exactly(self) -> bool:
        """Whether `speculation` is known to change no token but for rounding, so that advice may name it."""
        return self.kind == "local"

    @property
    def gpus(self) -> int:
        """GPUs that one engine needs."""
        return 0

    @property
    def devices(self) -> int:
        """GPUs of one engine, also if it only emulates them; 0: it computes on CPUs."""
        return self.gpus if self.emulates is None else self.emulates.engine_devices

    @property
    def static_share(self) -> float:
        """Share of each GPU's memory for weights and KV cache; the rest is for activations."""
        return 0.85

    @property
    def yields_cpus(self) -> bool:
        """True where the engine computes on CPUs, in a process with lower priority than the learner's."""
        return self.gpus == 0

    @property
    def emulates(self) -> EmulatedFleet | None:
        """The GPUs that a backend emulates; None: its engines generate and the run's own learner trains."""
        return None

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of running servers to attach to, one for each replica; empty: the run starts its engines."""
        return ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of `servers`."""
        return tuple(urlsplit(url).hostname or "" for url in self.servers)

    @property
    def placed_by(self) -> str:
        """Setting that determines `gpus` or `hosts`, for messages."""
        return "rollout.engine"

    @property
    def start_limit_s(self) -> float:
        """Longest start of an engine after its process has started, seconds."""
        return 0.0

    @property
    def secret_env(self) -> str | None:
        """Environment variable of the controller whose value replicas get when they open their engines."""
        return None

    def secret(self) -> str | None:
        """Return the value of `secret_env` in this process; None if it is unset, empty or not needed."""
        return (os.environ.get(self.secret_env) or None) if self.secret_env is not None else None

    def remedies(self) -> tuple[tuple[str, str, str], ...]:
        """Settings to change where generation limits the run: (setting, change, reason)."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """Arguments for opening an engine, e.g. of replica 3:

    `EngineLaunch(model_dir=Path("model"), logs=Path("logs"), index=3, secret=None)`.
    """

    model_dir: Path
    logs: Path  # folder for the engine's logs
    index: int  # of the replica
    secret: str | None  # `EngineConfig.secret()` in the controller
    server: str = ""  # the server of this replica, from `EngineConfig.servers`
    shared: bool = False  # the replica takes turns with the learner (`cluster.share`)
    shared_gpus: str = ""
    """GPUs of learner ranks that the engine uses in its turns (`cluster.share`), as CUDA_VISIBLE_DEVICES has them.

    This process sees no GPU then. Empty: the engine has GPUs of its own, which this process sees, or none.
    """


class LearnerStandIn(Protocol):
    """A learner that a backend brings in place of `learner.step.Learner`; one process makes its calls."""

    steps_taken: int

    def step(self, microbatches: Sequence[MicroBatch]) -> StepMetrics:
        """Make an optimizer step on `microbatches`."""
        ...

    def named_tensors(self, *, dtype: Any) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor of the weights after the last step, in a torch `dtype`."""
        ...

    def begin_save(self, folder: Path) -> None:
        """Begin a checkpoint in `folder`; return when the next step may begin."""
        ...

    def finish_save(self) -> str:
        """Wait until the checkpoint that `begin_save` began is complete on disk; return its fault, or ""."""
        ...

    def load(self, folder: Path) -> str:
        """Restore a checkpoint; return how the learner differs from it, or "".

        Raises `ConfigError` if the checkpoint is incomplete.
        """
        ...


Check: TypeAlias = Callable[[Any], None]  # of a `RunConfig`


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A kind of engine, e.g. `Backend(settings=EngineConfig, open=open_engine)`. Checks raise `ConfigError`."""

    settings: type[EngineConfig]  # model of `rollout.engine`
    open: Callable[[Any, EngineLaunch], Awaitable[InferenceEngine]]  # of a `RunConfig`
    """Start an engine without weights, in the replica's process. Raises `EngineLostError` if it cannot start."""
    check: Check = lambda config: None
    """Raise `ConfigError` for a config that the backend cannot serve; called whenever a config is read."""
    check_node: Check = lambda config: None
    """Raise `ConfigError` on a host that cannot start its engines; called on every node that gets a replica."""
    check_start: Check = lambda config: None
    """Raise `ConfigError` if engines lack something that the controller's host can see; called before a run."""
    open_learner: Callable[[Any], tuple[LearnerStandIn, LearnerStarted]] | None = None
    """Make the learner of a `RunConfig` in the learner's process; None: the run's own learner trains."""
    open_environments: Callable[[Any], Environments | None] = lambda config: None
    """Make the environments of a replica whose run has no section `environment`; None: a response is one turn."""
    known_speed: Callable[[Any], Any] = lambda config: None
    """The `EngineSpeed` for a `RunConfig`; None: the replica measures it."""


BACKENDS = Registry(
    Backend,
    field="rollout.engine.kind",
    group="laminar_py.backends",
    built_in={
        "local": "laminar_py.engines.local.backend:LOCAL",
        "sglang": "laminar_py.engines.sglang.backend:SGLANG",
    },
)
AnyEngineConfig: TypeAlias = Annotated[
    SerializeAsAny[EngineConfig],
    PlainValidator(named_section(EngineConfig, key="kind", registry=BACKENDS)),
    WithJsonSchema({"type": "object"}),
]
"""Section that the named backend's model validates; its JSON keeps all fields of that model."""
