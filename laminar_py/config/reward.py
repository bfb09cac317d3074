"""Settings of rewards and of the scoring stage, and the registry of their kinds.

A reward is a weighted sum of terms. The settings of the kind that `kind` names validate a term. A kind is built
in, or an installed package announces it in the entry point group `laminar_py.rewards`.
"""

import json
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, SerializeAsAny, WithJsonSchema, model_validator

from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.registry import Registry, named_section
from laminar_py.config.section import ConfigError, Count, Seconds, Section
from laminar_py.records.codec import IntArray
from laminar_py.records.scoring import ServerAddress, TermValue
from laminar_py.records.trajectory import Prompt

ServerFlag: TypeAlias = str | int | float | bool | tuple[str | int | float, ...]
PoolName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class ServerPoolConfig(Section):
    """A pool of SGLang servers of one model, which the run launches, watches and restarts, e.g. `{judge: {model:
    /models/judge, count: 2}}`. A term names a pool as its `servers`. The run makes a key for each server."""

    model: Path
    """Hugging Face folder of the model, the same on every node."""
    count: Count = 1
    """Number of servers."""
    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs of each server, on one node; 0: the server runs on a CPU."""
    python: Path | None = None
    """Python interpreter that has SGLang; default: the run's own."""
    flags: dict[str, ServerFlag] = {}  # noqa: RUF012 - pydantic copies it
    """Other flags of `sglang.launch_server`, without dashes, e.g. `mem-fraction-static: 0.85`. Write `true` for a
    flag without a value, a list for a flag with several values."""
    start_timeout_s: Seconds = 900.0
    """Longest start of a server, seconds. Also the limit of a call until a server's first answer, in place of the
    term's `timeout_s`: kernels compile in its first request."""

    @property
    def interpreter(self) -> Path:
        """Interpreter that launches servers, on every host."""
        return self.python or Path(sys.executable)


def server_name(pool: str, index: int) -> str:
    """Name of a server among the parts of a run, e.g. `server-judge-0`."""
    return f"server-{pool}-{index}"


FUNCTION = "function"


class TermConfig(Section):
    """A term of a reward."""

    kind: str = FUNCTION
    """`exact`, `format`, `length`, `math`, `code`, `judge`, `steps`, `environment`, `function`, or a kind of
    another installed package."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of the term's value in the sum."""
    name: str | None = None
    """Name of the term's value in metrics and on record, needed if a kind occurs twice. Default: the kind."""
    timeout_s: Seconds | None = None
    """Longest call for one response, seconds. Default: `reward.timeout_s`."""

    verdict: bool | str = False
    """The value is a verdict, right (1) or wrong (0): evaluations call its mean accuracy and have its pass@k. Of a
    function with several values, the name of the verdict."""

    asks_servers: ClassVar[bool] = False  # True where servers compute the value: the scorer waits and uses no core
    gives_columns: ClassVar[bool] = False  # True where the term may return columns beside its value
    rounding: ClassVar[float] = 1e-6  # relative difference that counts as equal when a reward is computed again

    @model_validator(mode="after")
    def _check_verdict(self) -> Self:
        named = self.verdict if isinstance(self.verdict, str) else None
        if named is not None and named != self.title and self.kind != FUNCTION:
            raise ConfigError(
                f"reward.use: {self.title}: verdict={named}: the term has one value; write true or false"
            )
        if named in ("", "yes", "no", "on", "off"):
            raise ConfigError(f"reward.use: {self.title}: verdict={named}: write true, false or a value's name")
        return self

    @property
    def title(self) -> str:
        """Name of the term's value."""
        return self.name or self.kind

    @property
    def verdict_name(self) -> str | None:
        """Name of the value that is a verdict; None: there is none."""
        return self.verdict if isinstance(self.verdict, str) else self.title if self.verdict else None

    @property
    def asked_unless(self) -> str | None:
        """Name of an earlier term; this term runs only where the earlier term gave 0 or less. None: always."""
        return None

    @property
    def pool(self) -> str | None:
        """Pool of `reward.servers` that computes the value; None: no server does."""
        return None

    @property
    def processes(self) -> int:
        """Most processes of a scorer that call the function; more than one where calls may hang."""
        return 1

    @property
    def opens_shm(self) -> bool:
        """Whether the function may write below `relay.shm`, where the weights of runs are."""
        return False

    @property
    def memory_bytes(self) -> int | None:
        """Most address space of each process, bytes; None: no limit."""
        return None


class FunctionTerm(TermConfig):
    """A function of your own in a Python file, e.g. `{kind: function, path: "rewards.py:score"}`, or just that
    path."""

    path: str
    """`path/to/file.py:function`."""
    most_processes: Count = 1
    """Most processes of each scorer; it starts one more when a response waits for a slow call."""
    shared_memory: bool = False
    """The function may write to `relay.shm`, as locks, queues and pools of `multiprocessing` need, and perhaps
    CUDA. It could then also change the weights that engines load from there."""
    gives_columns: ClassVar[bool] = True

    @property
    def title(self) -> str:
        """Name of the term's value, e.g. `rewards.py:score`."""
        return self.name or self.path

    @property
    def processes(self) -> int:
        """Most processes of a scorer that call the function."""
        return self.most_processes

    @property
    def opens_shm(self) -> bool:
        """Whether the function may write below `relay.shm`, where the weights of runs are."""
        return self.shared_memory


class ServedReward(Protocol):
    """An `async` function that the scorer calls in its own process."""

    @property
    def concurrency(self) -> int:
        """Number of responses that the function works on at the same time; other responses wait."""
        ...

    async def __call__(self, request: Any) -> object:
        """Return the value for a `ScoringRequest`, in any form that a reward function may return."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeContext:
    """Inputs from the scorer for a served term, e.g. `ServeContext(timeout_s=10.0, folder=folder, env={},
    ...)`."""

    timeout_s: float  # of a call for one response
    start_s: float = 0.0  # the same until the first answer of a server that the run launches
    folder: Path  # for logs
    env: Mapping[str, str]  # variables of `reward.env`
    sandbox: SandboxConfig
    decode: Callable[[IntArray], str]  # text of token ids
    addresses: Callable[[str], Awaitable[Sequence[ServerAddress]]]  # waits until a server of the pool is up


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKind:
    """A kind of term, with either `make` or `serve`, e.g. `RewardKind(settings=ExactTerm, make=make_exact)`.

    Each scorer calls `make` or `serve` once with the term's settings. A `ConfigError` in it ends the run.
    """

    settings: type[TermConfig]
    make: Callable[[Any], Callable[..., object]] | None = None
    """Make the reward function, which takes a `ScoringRequest`. The function runs in a process without the run's
    secrets, which is killed if it hangs."""
    serve: Callable[[Any, ServeContext], AbstractAsyncContextManager[ServedReward]] | None = None
    """Context that gives an `async` function, for terms with processes or connections of their own. The function
    runs in the scorer, must not block, and keeps its own time limits. It raises `NoValueError` for a response
    without a value."""
    caches: bool = False
    """True where equal responses to a problem have equal values, so that the scorer caches them."""
    check: Callable[[Any, SandboxConfig], None] = lambda term, sandbox: None
    """Raise `ConfigError` if the term cannot run on this host. Called before a run whose scorers run here."""
    fault: Callable[[Any, Prompt], str | None] = lambda term, problem: None
    """Message on a missing field of a problem, e.g. `"tests" is missing`; None where nothing is missing."""


REWARDS = Registry(
    RewardKind,
    field="reward.use.kind",
    group="laminar_py.rewards",
    built_in={
        "environment": "laminar_py.reward.terms:ENVIRONMENT",
        FUNCTION: "laminar_py.reward.terms:FUNCTION_KIND",
    },
)
_read_section = named_section(TermConfig, key="kind", registry=REWARDS)


def _read_term(given: object) -> TermConfig:
    """Read a term's section, or only its kind or the path of a function. Raises `ConfigError`."""
    if isinstance(given, str):
        if given.endswith(".py"):
            raise ConfigError(f"reward.use={given}: a file needs its function; write {given}:score")
        given = {"kind": FUNCTION, "path": given} if ":" in given else {"kind": given}
    return _read_section(given)


AnyTerm: TypeAlias = Annotated[
    SerializeAsAny[TermConfig], PlainValidator(_read_term), WithJsonSchema({"type": "object"})
]
"""Section that the settings of its kind validate; its JSON keeps all of their fields."""


def _read_terms(value: object) -> object:
    """Turn one term, or a list of terms, into a tuple; return any other value unchanged."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str | dict) else value


Terms: TypeAlias = Annotated[tuple[AnyTerm, ...], BeforeValidator(_read_terms)]


def read_term(data: str) -> TermConfig:
    """Read a term from JSON. Raises `ConfigError` if the package of its kind is missing here."""
    return _read_section(json.loads(data))


class RewardConfig(Section):
    """Rewards and the scoring stage."""

    use: Terms = ()
    """Terms whose weighted sum is the reward, e.g. `[{kind: exact, pattern: '#(\\d)$'}, {kind: length, most: 9}]`.
    Write just the kind of a term without settings, and just the path of your own function:
    `[rewards.py:score]`."""
    by_task: dict[str, Terms] = {}  # noqa: RUF012 - pydantic copies it
    """Terms for a task's problems instead of `use`, e.g. `{code: [rewards.py:run_tests]}`."""
    by_set: dict[str, Terms] = {}  # noqa: RUF012 - pydantic copies it
    """Terms for an evaluation set instead of `use` and `by_task`, e.g. `{aime: [math]}`."""
    servers: dict[PoolName, ServerPoolConfig] = {}  # noqa: RUF012 - pydantic copies it
    """Pools of servers that the run launches for terms, by name."""
    workers: Count = 1
    """Scoring processes."""
    timeout_s: Seconds = 10.0
    """Longest call for one response, seconds, unless its term has its own `timeout_s`; then the trajectory is
    dropped as `reward_timeout`. Calls that raise `TryAgainError` are retried for two minutes."""
    env: tuple[str, ...] = ()
    """Environment variables that reward functions get; tokens and keys of the run are never among them."""

    @property
    def rules(self) -> Mapping[str, tuple[TermConfig, ...]]:
        """Task -> terms; `""` stands for all other tasks."""
        return {"": self.use, **self.by_task} if self.use else self.by_task

    @property
    def terms(self) -> tuple[TermConfig, ...]:
        """Terms of every task and every set."""
        rules = (*self.rules.values(), *self.by_set.values())
        return tuple(term for terms in rules for term in terms)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Names of the values that are right or wrong, of every task and every set."""
        return tuple(dict.fromkeys(term.verdict_name for term in self.terms if term.verdict_name is not None))

    def verdict_fault(self, task: str, values: Collection[TermValue]) -> str:
        """Return a line for the user if a task's `values` lack the verdict that a term of it names; else "".

        A term with `unless` may have had no call, so it is not judged.
        """
        given = [value.name for value in values]
        lacking = (one for one in self.of_task(task) if one.asked_unless is None and one.verdict_name is not None)
        term = next((one for one in lacking if one.verdict_name not in given), None)
        if term is None:
            return ""
        verdict = "true" if term.verdict is True else term.verdict
        return (
            f"reward.use: {term.title}: verdict={verdict}: no value has the name {term.verdict_name}, so"
            " evaluations have no accuracy; set verdict to the value that is right (1) or wrong (0):"
            f" {' or '.join(given)}"
        )

    @property
    def waits_for_servers(self) -> bool:
        """True where a training term waits for servers that use no core of this machine."""
        asking = [term for terms in self.rules.values() for term in terms if term.asks_servers]
        return any(term.pool is None or self.servers[term.pool].gpus for term in asking)

    @property
    def title(self) -> str:
        """Names of all terms, for messages."""
        return ", ".join(dict.fromkeys(term.title for term in self.terms))

    @property
    def launched(self) -> tuple[tuple[str, int], ...]:
        """Servers that the run launches: (pool, number in the pool)."""
        return tuple((pool, index) for pool, settings in self.servers.items() for index in range(settings.count))

    def of_task(self, task: str, *, set_name: str = "") -> tuple[TermConfig, ...]:
        """Return the terms for a task's problems, in training or in an evaluation set; empty if there are none."""
        return self.by_set.get(set_name) or self.by_task.get(task, self.use)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check the names and conditions of all terms, by task and by set. Raises `ConfigError`."""
        if not self.rules:
            raise ConfigError(
                "reward.use: no reward; name one, e.g. exact with a pattern, or path/to/file.py:function"
            )
        fields = {f"reward.by_task.{task}" if task else "reward.use": terms for task, terms in self.rules.items()}
        fields |= {f"reward.by_set.{name}": terms for name, terms in self.by_set.items()}
        for field, terms in fields.items():
            names = [term.title for term in terms]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"{field}: two terms have the name {twice}; give each its own `name`")
            if not names:
                raise ConfigError(f"{field}: has no term; name one or leave it out")
            for place, term in enumerate(terms):
                if term.asked_unless is not None and term.asked_unless not in names[:place]:
                    raise ConfigError(
                        f"{field}: {term.title} has unless={term.asked_unless}, which is no earlier term;"
                        " name an earlier term, or leave unless out"
                    )
        self._check_pools()
        return self

    def _check_pools(self) -> None:
        """Raise `ConfigError` if a term names an unknown server pool, or no term uses a pool."""
        asked = {term.pool: term.title for term in self.terms if term.pool is not None}
        for pool, title in asked.items():
            if pool not in self.servers:
                known = ", ".join(self.servers) or "no pool"
                raise ConfigError(f"servers={pool} of {title}: reward.servers has {known}; add it there")
        for pool in self.servers:
            if pool not in asked:
                raise ConfigError(
                    f"reward.servers.{pool}: no term asks it; name it in one term as `servers`, or remove it"
                )


def check_sets(reward: RewardConfig, sets: Collection[str]) -> None:
    """Raise `ConfigError` if `reward.by_set` has terms for a set that is not in `eval.sets`."""
    unknown = next((name for name in reward.by_set if name not in sets), None)
    if unknown is not None:
        known = ", ".join(sets) or "none"
        raise ConfigError(f"reward.by_set.{unknown}: no such set in eval.sets; name one of these: {known}")


def check_tasks(reward: RewardConfig, tasks: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a task without a reward, or a reward for a task without problems.

    `tasks` maps each task to the place of one of its problems, e.g. a file and line, for messages.
    """
    known = ", ".join(sorted(task for task in tasks if task)) or "none"
    for task in reward.by_task:
        if task not in tasks:
            raise ConfigError(
                f"reward.by_task.{task}: no problem has this task; remove it, or name one of the tasks: {known}"
            )
    for task, place in tasks.items():
        if not reward.of_task(task):
            raise ConfigError(f"{place}: task {task!r} has no reward; add it to reward.by_task, or set reward.use")
