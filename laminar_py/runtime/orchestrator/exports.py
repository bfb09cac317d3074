"""`laminar export`: a checkpoint as a plain Hugging Face folder, or as an adapter. Called by the command line.

An export never changes the run, which may still train (`tests/orchestrator/test_exports.py`).
"""

from dataclasses import dataclass
from pathlib import Path

from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import served_dtype
from laminar_py.learner.marker import read_marker
from laminar_py.ledger.recovery import newest_existing
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Checkpointed
from laminar_py.runtime.orchestrator.checkpoints import on_record
from laminar_py.runtime.preflight.inputs import check_adapters, initial_folder, stop_ids


@dataclass(frozen=True, slots=True)
class Exported:
    """The exported checkpoint, e.g. `Exported(Path("runs/math-1/checkpoints/step-40-1.0"), 40)`."""

    checkpoint: Path  # a run that still trains may have deleted it since
    step: int
    base: Path | None = None  # of an adapter


def export(source: Path, out: Path, *, dtype: str | None = None, adapter: bool = False) -> Exported:
    """Write `out` from `source`, a checkpoint or a run's newest one; return which checkpoint was written.

    Without a `dtype`, weights have the dtype in which the run served the model. LoRA adapters are merged into
    their base; as an `adapter` they are written alone. Raises ConfigError.
    """
    if out.exists():
        raise ConfigError(f"out={out}: is there already; name a folder that is not, or delete it")
    run = run_of(source)
    if out.resolve().is_relative_to(run.path.resolve()):
        raise ConfigError(f"out={out}: is inside the run's own folder {run.path}; name one outside of it")
    if run.path != source:
        return _export(run, source, out, dtype, adapter)
    while True:
        newest = _newest(run)
        try:
            return _export(run, run.path / newest.path, out, dtype, adapter)
        except (ConfigError, OSError):
            if _newest(run) == newest:
                raise
            # else the run may have deleted this checkpoint during the read, after it saved a newer one


def run_of(source: Path) -> RunFolder:
    """Return the run that `source` is, or that has the checkpoint `source`. Raises ConfigError."""
    for path in (source, source.absolute().parent.parent):
        if (path / "config.yaml").is_file():
            return RunFolder(path)
    raise ConfigError(
        f"source={source}: neither a run's folder nor a checkpoint in one; name for example runs/quickstart-1"
    )


def _newest(run: RunFolder) -> Checkpointed:
    """Return the newest checkpoint on record. Raises ConfigError if the run has none, or if all are deleted."""
    newest = newest_existing(on_record(run), run.has)
    if newest is None:
        raise ConfigError(f"run={run.path}: has no checkpoint yet; wait for its first one, or resume it")
    return newest


def _export(run: RunFolder, checkpoint: Path, out: Path, dtype: str | None, adapter: bool) -> Exported:
    """Export a checkpoint of a run to the folder `out` in `dtype`, as a Hugging Face model or as an adapter."""
    from laminar_py.learner.export import export_checkpoint

    step = read_marker(checkpoint).step
    config = load_config(run.config, [])
    model, lora = config.model.path, config.learner.lora
    base = None if lora is None else _base(config)
    if adapter:
        _check_adapter(config, run)
    export_checkpoint(
        checkpoint,
        out,
        source=model,
        dtype=dtype or served_dtype(model),
        lora=lora,
        base=base,
        adapter=adapter,
        stop_ids=stop_ids(config),
    )
    return Exported(checkpoint, step, base if adapter else None)


def _check_adapter(config: RunConfig, run: RunFolder) -> None:
    """Raise ConfigError if a run has no adapters, or has trained the base of its adapters itself."""
    if config.learner.lora is None:
        raise ConfigError(
            f"--adapter: {run.path} has no learner.lora and trains all weights; leave --adapter out for the whole"
            " model"
        )
    if config.warm_start is not None:
        raise ConfigError(
            f"--adapter: the adapters of {run.path} belong to the result of its warm start, which nobody else has,"
            f" and not to model.path={config.model.path}; leave --adapter out for the merged model"
        )


def _base(config: RunConfig) -> Path:
    """Return the folder of the model to which the run's LoRA adapters are added."""
    check_adapters(config)
    warm_start = config.warm_start
    base = initial_folder(config)
    if warm_start is not None and not base.is_dir():
        raise ConfigError(
            f"warm_start.cache={warm_start.cache}: no {base.name} in it, which the run's adapters are added"
            " to; put it back, or call from the folder that the run was started in"
        )
    return base
