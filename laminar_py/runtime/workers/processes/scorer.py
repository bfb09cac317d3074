"""The process of a scorer."""

from pathlib import Path

from laminar_py.records.codec import decode, encode
from laminar_py.records.scoring import Unfinished, Unscored
from laminar_py.records.servers import PoolAddresses
from laminar_py.reward.scorer import LaunchedServers
from laminar_py.runtime.workers.processes.setup import PartActor, open_part, open_reader, open_writer
from laminar_py.runtime.workers.specs import ScorerSpec


class ScorerActor(PartActor):
    """Shell of a scorer."""

    def __init__(self) -> None:
        super().__init__()
        self._launched = LaunchedServers()

    async def start(self, data: bytes) -> int:
        """Start what the terms of the reward need; answers how many responses it works on at a time."""
        from laminar_py.data.tokenizer import load_tokenizer
        from laminar_py.reward.scorer import ScoredPayload, Scorer

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
            launched=self._launched,
            payload=ScoredPayload(open_reader(spec), open_writer(spec)),
        )
        await self._scorer.__aenter__()  # until `stop`; what it holds ends with the process too
        return self._scorer.at_once

    async def reach(self, data: bytes) -> None:
        """Take the addresses of launched servers, a `PoolAddresses`."""
        self._launched.update(decode(PoolAddresses, data))

    async def submit(self, data: bytes) -> None:
        """Begin with a list of `Unscored`."""
        self._scorer.submit_responses(decode(list[Unscored], data))

    async def look_ahead(self, data: bytes) -> None:
        """Work ahead on a list of `Unfinished`."""
        self._scorer.look_ahead(decode(list[Unfinished], data))

    async def take(self, wait_s: float) -> bytes:
        """A list of `Score`, empty after `wait_s` seconds without any."""
        return encode(await self._scorer.next_scores(wait_s))

    async def stop(self) -> None:
        """End what the terms hold: processes, and what sandboxes have on this machine."""
        await self._scorer.__aexit__(None, None, None)
