"""Checks of an engine's weights after a load: hashes of its tensors, and probes that its requests answer.

`rollout.replica` calls them. The hashes tell at once that a tensor did not follow the published files. A probe is
a request like any other for one token, so it also sees adapters, caches and sampling settings; the controller
compares its answers with the learner (`control.alarms.weights`).
"""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from laminar_py.records.codec import IntArray
from laminar_py.records.engine import EngineLostError, GenerateRequest, InferenceEngine, SamplingParams
from laminar_py.records.proofs import ProbeAnswer, WeightsChecksum
from laminar_py.records.weights import tensor_samples

# tokens after each prompt, each by a request of its own: many after the first loads, since wrong sampling settings
# are wrong from the start and only many draws show them; later as many as the weights need
DRAWS, LATER_DRAWS, FIRST_LOADS = 16, 4, 16
PROBE_S = 5.0  # longest wait for answers; a full engine has no place for probes
FUSED = (  # engine's name -> names in the files
    (re.compile(r"\bqkv_proj\b"), r"[qkv]_proj"),
    (re.compile(r"\bgate_up_proj\b"), r"(gate|up)_proj"),
    (re.compile(r"\bexperts\\\.w13_weight$"), r"experts\.\d+\.(gate|up)_proj\.weight"),
    (re.compile(r"\bexperts\\\.w2_weight$"), r"experts\.\d+\.down_proj\.weight"),
)
# verified loads in a row; the part of a tensor on one of several GPUs may stay equal once, as may rounded values
SEVERAL_LOADS = 3


def differing(one: WeightsChecksum, other: WeightsChecksum) -> tuple[str, ...]:
    """Return the tensors whose hashes differ; "a tensor" if only the totals tell."""
    names = tuple(name for name, value in other.tensors.items() if one.tensors.get(name) != value)
    return names or (("a tensor",) if one.total != other.total else ())


class TensorWatch:
    """Compares changes of an engine's tensors with changes of the files that it loaded."""

    def __init__(self) -> None:
        self._files: Mapping[str, str] = {}  # samples of the last verified version
        self._tensors: Mapping[str, str] = {}  # hashes of the engine's tensors then
        self._stood = Counter[str]()  # tensor -> verified loads in a row in which it should have changed

    async def stale(self, folder: Path, checksum: WeightsChecksum) -> tuple[str, ...]:
        """Return the tensors whose file changed since the last call while the engine's tensor did not."""
        files = await asyncio.to_thread(tensor_samples, folder) if checksum.tensors else {}
        changed = {name for name in files.keys() & self._files.keys() if files[name] != self._files[name]}
        stood = [
            name
            for name, value in checksum.tensors.items()
            if self._tensors.get(name) == value and changed & _sources(name, self._files)
        ]
        self._stood = Counter({name: self._stood[name] + 1 for name in stood})
        self._files, self._tensors = files, checksum.tensors
        least = SEVERAL_LOADS if "-" in checksum.total or checksum.quantized else 1
        return tuple(name for name, loads in self._stood.items() if loads >= least)


def _sources(tensor: str, files: Mapping[str, str]) -> set[str]:
    """Return the names in the files whose tensors make an engine's tensor."""
    name = tensor.partition("/")[2] or tensor
    if name in files:
        return {name}
    if name == "lm_head.weight":
        return {"model.embed_tokens.weight"}  # tied
    pattern = re.escape(name)
    for fused, parts in FUSED:
        pattern = fused.sub(lambda _, parts=parts: parts, pattern)  # type: ignore[misc]
    return {file for file in files if re.fullmatch(pattern, file)}


class Prober:
    """Asks an engine for tokens after each of the run's `prompts`, e.g. `Prober(engine, prompts, sampling)`."""

    def __init__(
        self, engine: InferenceEngine, prompts: Sequence[IntArray], sampling: SamplingParams, *, replica: int
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._sampling = sampling
        self._replica = replica
        self._loads = 0

    async def answers(self, version: int) -> list[ProbeAnswer]:
        """Return the answers under the weights that the engine serves; fewer if it is lost, or has no place for
        `PROBE_S`."""
        found: list[ProbeAnswer] = []
        self._loads += 1
        draws = range(DRAWS if self._loads <= FIRST_LOADS else LATER_DRAWS)
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout(PROBE_S), asyncio.TaskGroup() as requests:
                    for probe in range(len(self._prompts)):
                        for draw in draws:
                            requests.create_task(self._ask(probe, draw, version, found))
            except* EngineLostError:
                pass  # the replica notices the loss by itself
        return found

    async def _ask(self, probe: int, draw: int, version: int, found: list[ProbeAnswer]) -> None:
        name = f"probe-{self._replica}-{version}-{probe}-{draw}"
        seed = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little") >> 1
        request = GenerateRequest(
            rid=name,
            group_id=f"probe-{probe}",
            prompt_ids=self._prompts[probe],
            prefix_ids=np.zeros(0, np.int32),
            sampling=msgspec.structs.replace(self._sampling, max_new_tokens=1, seed=seed),
        )
        async with aclosing(self._engine.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if len(delta.ids):
                    stamped = (delta.spans[0].version if delta.spans else None) or delta.version
                    found.append(ProbeAnswer(stamped, probe, int(delta.ids[0]), float(delta.logprobs[0])))
