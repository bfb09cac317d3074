"""The process of a scorer."""

from pathlib import Path

import msgspec

from laminar_py.records.codec import decode, encode
from laminar_py.records.scoring import ScoringRequest
from laminar_py.workers.processes.setup import PartActor, open_part
from laminar_py.workers.specs import ScorerSpec


class ScorerActor(PartActor):
    """Shell of a scorer; single-threaded, so that a reward function runs in its main thread."""

    def start(self, data: bytes) -> None:
        """Load the reward function."""
        from laminar_py.data.tokenizer import load_tokenizer
        from laminar_py.reward.begun import BegunFile, begun_path
        from laminar_py.reward.registry import load_reward
        from laminar_py.reward.worker import ScoringWorker

        spec = decode(ScorerSpec, data)
        config = open_part(spec, f"scorer-{spec.index}")
        reward = config.reward
        function = load_reward(reward.function, pattern=reward.pattern)
        self._tokenizer = load_tokenizer(config.model.path)
        self._worker = ScoringWorker(
            function,
            timeout_s=reward.timeout_s,
            columns=config.algorithm.scored_columns,
            begin=BegunFile(begun_path(Path(spec.run_dir), spec.index), timeout_s=reward.timeout_s).begin,
        )

    def score(self, data: bytes) -> bytes:
        """A list of `Score` for a list of `ScoringRequest`, whose texts are made here, each when it is begun."""
        requests = (
            msgspec.structs.replace(request, response=self._tokenizer.decode(request.response_ids))
            for request in decode(list[ScoringRequest], data)
        )
        return encode(self._worker.score(requests))
