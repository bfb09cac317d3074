"""The process of a scorer."""

from pathlib import Path

from laminar_py.records.codec import decode, encode
from laminar_py.records.scoring import ScoringRequest
from laminar_py.workers.processes.setup import PartActor, open_part
from laminar_py.workers.specs import ScorerSpec


class ScorerActor(PartActor):
    """Shell of a scorer."""

    async def start(self, data: bytes) -> int:
        """Start what the terms of the reward need; answers how many responses it works on at a time."""
        from laminar_py.data.tokenizer import load_tokenizer
        from laminar_py.reward.scorer import Scorer

        spec = decode(ScorerSpec, data)
        name = f"scorer-{spec.index}"
        config = open_part(spec, name)
        self._scorer = Scorer(
            config.reward,
            sandbox=config.sandbox,
            columns=config.algorithm.scored_columns,
            decode=load_tokenizer(config.model.path).decode,
            folder=Path(spec.run_dir) / "logs",
            record=Path(spec.run_dir),
            name=name,
        )
        await self._scorer.__aenter__()  # the process ends with what it holds
        return self._scorer.at_once

    async def submit(self, data: bytes) -> None:
        """Begin with a list of `ScoringRequest`."""
        self._scorer.submit(decode(list[ScoringRequest], data))

    async def take(self, wait_s: float) -> bytes:
        """A list of `Score`, empty after `wait_s` seconds without any."""
        return encode(await self._scorer.take(wait_s))
