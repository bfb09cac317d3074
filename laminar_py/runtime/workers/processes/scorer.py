"""The process of a scorer."""

from pathlib import Path

from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.records.scoring import PoolAddresses, Score, Unscored
from laminar_py.reward.calls.child import WriteFence
from laminar_py.reward.scorer import LaunchedServers, Scorer, ScorerStorage
from laminar_py.runtime.workers.processes.base import PartActor, open_reader, open_writer, read_run_config
from laminar_py.runtime.workers.specs import ScorerSpec


class ScorerActor(PartActor):
    """Hosts a scorer."""

    def __init__(self) -> None:
        super().__init__()
        self._launched = LaunchedServers()

    async def start(self, spec: ScorerSpec) -> int:
        """Start the reward's terms; return how many responses the scorer processes at a time."""
        name = f"scorer-{spec.index}"
        config = read_run_config(spec, name)
        self._scorer = Scorer(
            config.reward,
            sandbox=config.sandbox,
            columns=config.algorithm.scored_columns,
            decode=load_tokenizer(config.model.path).decode,
            folder=Path(spec.run_dir) / "logs",
            fence=WriteFence(str(Path(spec.run_dir).parent), str(config.relay.shm)),
            name=name,
            launched=self._launched,
            payload=ScorerStorage(open_reader(spec, config), open_writer(spec, config)),
        )
        await self._scorer.__aenter__()  # until `stop`; its resources end with the process too
        return self._scorer.concurrency

    async def reach(self, addresses: PoolAddresses) -> None:
        """Use these addresses of launched servers from now on."""
        self._launched.update(addresses)

    async def submit_responses(self, responses: list[Unscored]) -> None:
        """Start to score responses, and return at once."""
        self._scorer.submit_responses(responses)

    async def next_scores(self, wait_s: float) -> list[Score]:
        """Return the scores that are ready, or none after `wait_s` seconds."""
        return await self._scorer.next_scores(wait_s)

    async def stop(self) -> None:
        """End the processes and the sandboxes of the terms on this machine."""
        await self._scorer.__aexit__(None, None, None)
