"""Weights that an evaluation is of, published by a process of its own beside the root relay, without a learner.

Owned by the controller of an evaluation. Invariant: the version is 0, also where the evaluation goes on, and has
the digest that is on record.
"""

from collections.abc import Sequence

from laminar_py.records.weights import Published
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.specs import WeightsSpec

PUBLISH_S = 3600.0  # a large model is read from a slow disk


class WeightFolder:
    """The model of the run's config as a version."""

    def __init__(self, incarnation: Incarnation, *, relays: Relays) -> None:
        self._incarnation = incarnation
        self._relays = relays
        spec = PartSpec(
            names=["weights"],
            actor="laminar_py.runtime.workers.processes.learner:WeightsActor",
            concurrency=1,
            timeout_s=PUBLISH_S,
            places=lambda: incarnation.placement.plan.learner[:1],
            start=self._start,
        )
        self._keeper = Keeper(spec, incarnation)

    def spawn(self) -> None:
        """Start the process."""
        self._keeper.spawn()

    async def publish(self) -> Published:
        """Publish, by another process where one dies over it. Raises RunFailedError."""

        async def call(parts: Sequence[Part]) -> Published:
            spec = WeightsSpec(
                config=self._incarnation.config.model_dump_json(),
                run_dir=str(self._incarnation.run.path),
                store=str(self._relays.store(0)),
                chunk_bytes=self._relays.chunk_bytes,
            )
            return await parts[0].ask(Published, "publish", spec)

        return await self._keeper.calling(call)

    async def _start(self, parts: Sequence[Part]) -> None:
        await self._relays.root_up()
