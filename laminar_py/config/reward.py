"""Settings of rewards and of the scoring stage.

A reward is a sum of terms. A term is raw until `kind` names its own settings; a kind is built in or announced by
an installed package as `laminar_py.rewards`.
"""

import json
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeAlias, runtime_checkable

from pydantic import BeforeValidator, Field, PlainValidator, SerializeAsAny, WithJsonSchema, model_validator

from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.registry import Registry, named_section
from laminar_py.config.section import ConfigError, Count, Seconds, Section
from laminar_py.records.codec import IntArray
from laminar_py.records.scoring import ServerAddress
from laminar_py.records.trajectory import Prompt

ServerFlag: TypeAlias = str | int | float | bool | tuple[str | int | float, ...]
PoolName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class ServerPoolConfig(Section):
    """A pool of SGLang servers of one model, which the run launches, watches and starts anew; a term names it as
    its `servers`, e.g. `{judge: {model: /models/judge, count: 2}}`. They have keys of their own."""

    model: Path
    """Hugging Face folder of the model, the same on every node."""
    count: Count = 1
    """Servers."""
    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs of each, on one node; 0: on a CPU."""
    python: Path | None = None
    """Interpreter of the environment that has SGLang; default: the run's own."""
    flags: dict[str, ServerFlag] = {}  # noqa: RUF012 - pydantic copies it
    """Any other flag of `sglang.launch_server`, without its dashes, e.g. `mem-fraction-static: 0.85`; `true` for
    one that takes no value, a list for one that takes several."""
    start_timeout_s: Seconds = 900.0
    """Longest start of a server."""

    @property
    def interpreter(self) -> Path:
        """Interpreter that launches servers, on every host that has some."""
        return self.python or Path(sys.executable)


def server_name(pool: str, index: int) -> str:
    """Name of a server as a part of the run, e.g. `server-judge-0`."""
    return f"server-{pool}-{index}"


FUNCTION = "function"


class TermConfig(Section):
    """A term of a reward."""

    kind: str = FUNCTION
    """`exact`, `format`, `length`, `math`, `code`, `judge`, `steps`, `environment`, `function`, or one that an
    installed package announces as `laminar_py.rewards`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of its value in the sum."""
    name: str | None = None
    """Name of its value in metrics and on record, where one kind occurs twice. Default: the kind."""
    timeout_s: Seconds | None = None
    """Longest time of a call for one response. Default: `reward.timeout_s`."""

    @property
    def title(self) -> str:
        """Name of its value."""
        return self.name or self.kind

    @property
    def asked_unless(self) -> str | None:
        """Name of an earlier term; this one is asked only where that gave 0 or less."""
        return None

    @property
    def pool(self) -> str | None:
        """Pool of `reward.servers` that it asks; None where it asks none."""
        return None

    @property
    def asks_servers(self) -> bool:
        """True where its value is computed by servers, so that a scorer waits and takes no core."""
        return self.pool is not None

    @property
    def gives_columns(self) -> bool:
        """True where it may return columns beside its value."""
        return False

    @property
    def rounding(self) -> float:
        """Difference up to which a reward with it is the same, computed again: of its size, or of 1."""
        return 1e-6

    @property
    def looks_ahead(self) -> bool:
        """True where a scorer serves it as a `ForesightedReward`."""
        return False

    @property
    def processes(self) -> int:
        """Processes at most that a scorer calls its function in; more than one where calls may hang."""
        return 1

    @property
    def calls_at_once(self) -> int:
        """Calls at the same time in one process, of a function that is not `async`."""
        return 1

    @property
    def memory_bytes(self) -> int | None:
        """Address space of each process at most, where a call may ask for any amount."""
        return None


class FunctionTerm(TermConfig):
    """A function of your own in a Python file, e.g. `{kind: function, path: "rewards.py:score"}`, or that path."""

    path: str
    """`path/to/file.py:function`."""
    most_processes: Count = 1
    """Processes of each scorer at most: one more wherever a response waits for one that is slow."""
    threads: Count = 1
    """Calls at once in one process, for a thread-safe function that waits for something and is not `async`."""

    @property
    def title(self) -> str:
        """Name of its value, e.g. `rewards.py:score`."""
        return self.name or self.path

    @property
    def gives_columns(self) -> bool:
        """True: a `Reward` may have any."""
        return True

    @property
    def processes(self) -> int:
        """Processes at most."""
        return self.most_processes

    @property
    def calls_at_once(self) -> int:
        """Threads."""
        return self.threads


class ServedReward(Protocol):
    """An `async` function that a scorer calls itself."""

    @property
    def at_once(self) -> int:
        """Responses that it works on at the same time; others wait."""
        ...

    async def __call__(self, request: Any) -> object:
        """Value of a `ScoringRequest`, in any form that a reward function may return."""
        ...


@runtime_checkable
class ForesightedReward(ServedReward, Protocol):
    """Served reward that works ahead on responses that still generate."""

    async def look_ahead(self, response: Any) -> None:
        """Work on a `PartialResponse`, perhaps not the last of its trajectory; the value must not depend on it.
        It may raise what a call may, and be cancelled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeContext:
    """Place of a scorer, for a term that it serves itself."""

    timeout_s: float  # of a call for one response
    folder: Path  # for logs
    env: Mapping[str, str]  # the variables that `reward.env` names
    sandbox: SandboxConfig
    decode: Callable[[IntArray], str]  # text of token ids
    addresses: Callable[[str], Awaitable[Sequence[ServerAddress]]]  # of a pool's servers, once any is up


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKind:
    """A kind of term, e.g. `RewardKind(settings=ExactTerm, make=ExactReward)`; it has either `make` or `serve`.

    Both are called once in each scorer, with the term's settings; what they raise as `ConfigError` ends the run.
    """

    settings: type[TermConfig]
    make: Callable[[Any], Callable[..., object]] | None = None
    """The function itself, which takes a `ScoringRequest`, as one of your own does. It runs in a process that has
    none of the run's secrets and is ended where it hangs."""
    serve: Callable[[Any, ServeContext], AbstractAsyncContextManager[ServedReward]] | None = None
    """A context that gives an `async` function, for what keeps processes or connections of its own. It runs in the
    scorer itself, must not block, and sees to its own time limits; `NoValueError` says why a response has no
    value."""
    caches: bool = False
    """True where equal responses to a problem have equal values, so that one is computed."""
    runs_programs: bool = False
    """True where it runs what the model wrote, for which a host of scorers has to offer a sandbox."""
    fault: Callable[[Any, Prompt], str | None] = lambda term, problem: None
    """What a problem lacks, e.g. `"tests" is missing`; None where it has all that the term needs."""


REWARDS = Registry(
    RewardKind,
    field="reward.use.kind",
    group="laminar_py.rewards",
    built_in={
        "exact": "laminar_py.reward.terms:EXACT",
        "format": "laminar_py.reward.terms:FORMAT",
        "length": "laminar_py.reward.terms:LENGTH",
        "code": "laminar_py.reward.code:CODE",
        "environment": "laminar_py.reward.terms:ENVIRONMENT",
        "judge": "laminar_py.reward.judge:JUDGE",
        "steps": "laminar_py.reward.steps:STEPS",
        FUNCTION: "laminar_py.reward.terms:FUNCTION_KIND",
    },
)
_read_section = named_section(TermConfig, key="kind", registry=REWARDS)


def _read_term(given: object) -> TermConfig:
    """A term, also where it is given as no more than a kind or the path of a function."""
    if isinstance(given, str):
        if given.endswith(".py"):
            raise ConfigError(f"reward.use={given}: a file needs its function; write {given}:score")
        given = {"kind": FUNCTION, "path": given} if ":" in given else {"kind": given}
    return _read_section(given)


AnyTerm: TypeAlias = Annotated[
    SerializeAsAny[TermConfig], PlainValidator(_read_term), WithJsonSchema({"type": "object"})
]
"""A section that is raw until the model of its kind has validated it; JSON keeps all of its fields."""


def _read_terms(given: object) -> object:
    """Terms, also where there is one and no list."""
    return tuple(given) if isinstance(given, list) else (given,) if isinstance(given, str | dict) else given


Terms: TypeAlias = Annotated[tuple[AnyTerm, ...], BeforeValidator(_read_terms)]


def read_term(data: str) -> TermConfig:
    """A term from its JSON. `ConfigError` where a plugin of it is not here."""
    return _read_section(json.loads(data))


class RewardConfig(Section):
    """Rewards, and the stage that gives them."""

    use: Terms = ()
    """Terms whose weighted sum is the reward, e.g. `[{kind: exact, pattern: '#(\\d)$'}, {kind: length, most: 9}]`.
    A kind without settings stands for itself, a function of your own for its path: `[rewards.py:score]`."""
    by_task: dict[str, Terms] = {}  # noqa: RUF012 - pydantic copies it
    """Terms of the problems of a task, in place of `use`, e.g. `{code: [rewards.py:run_tests]}`."""
    by_set: dict[str, Terms] = {}  # noqa: RUF012 - pydantic copies it
    """Terms of an evaluation set, in place of both, e.g. `{aime: [math]}`; other sets have those of training."""
    servers: dict[PoolName, ServerPoolConfig] = {}  # noqa: RUF012 - pydantic copies it
    """Servers that the run launches for terms, by a name of yours."""
    workers: Count = 1
    """Scoring processes."""
    timeout_s: Seconds = 10.0
    """Longest time of a call for one response, unless its term has a `timeout_s` of its own; what takes longer is
    dropped as `reward_timeout`. Calls that another try may mend are made again for two minutes."""
    env: tuple[str, ...] = ()
    """Environment variables that reward functions see; tokens and keys of the run are not among them."""

    @property
    def rules(self) -> Mapping[str, tuple[TermConfig, ...]]:
        """Terms by task; `""` has those of all other tasks."""
        return {"": self.use, **self.by_task} if self.use else self.by_task

    @property
    def terms(self) -> tuple[TermConfig, ...]:
        """Terms of every task and every set."""
        rules = (*self.rules.values(), *self.by_set.values())
        return tuple(term for terms in rules for term in terms)

    @property
    def waits_for_servers(self) -> bool:
        """True where a term of training waits for servers that take none of this machine's cores."""
        asking = [term for terms in self.rules.values() for term in terms if term.asks_servers]
        return any(term.pool is None or self.servers[term.pool].gpus for term in asking)

    @property
    def looks_ahead(self) -> bool:
        """True where a term looks ahead, and the scorer that does is the one to get the finished response."""
        return self.workers == 1 and any(term.looks_ahead for term in self.terms)

    @property
    def title(self) -> str:
        """Names of all terms, as complaints have them."""
        return ", ".join(dict.fromkeys(term.title for term in self.terms))

    @property
    def launched(self) -> tuple[tuple[str, int], ...]:
        """Servers that the run launches: pool, and number in it."""
        return tuple((pool, index) for pool, settings in self.servers.items() for index in range(settings.count))

    def of_task(self, task: str, *, set_name: str = "") -> tuple[TermConfig, ...]:
        """Terms of a problem's reward, in a set of its own; none where the config has none for its task."""
        return self.by_set.get(set_name) or self.by_task.get(task, self.use)

    @model_validator(mode="after")
    def _check(self) -> Self:
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
                raise ConfigError(f"{field}: two terms are called {twice}; give each a `name` of its own")
            if not names:
                raise ConfigError(f"{field}: has no term; name one or leave it out")
            for place, term in enumerate(terms):
                if term.asked_unless is not None and term.asked_unless not in names[:place]:
                    raise ConfigError(f"{field}: {term.title} has unless={term.asked_unless}, no term before it")
        self._check_pools()
        return self

    def _check_pools(self) -> None:
        asked = {term.pool: term.title for term in self.terms if term.pool is not None}
        for pool, title in asked.items():
            if pool not in self.servers:
                known = ", ".join(self.servers) or "no pool"
                raise ConfigError(f"servers={pool} of {title}: reward.servers has {known}; add it there")
        for pool in self.servers:
            if pool not in asked:
                raise ConfigError(
                    f"reward.servers.{pool}: no term asks it; name it in one as `servers`, or leave it out"
                )


def check_sets(reward: RewardConfig, sets: Collection[str]) -> None:
    """Refuse terms of a set that `eval.sets` does not have. Raises `ConfigError`."""
    unknown = next((name for name in reward.by_set if name not in sets), None)
    if unknown is not None:
        known = ", ".join(sets) or "none"
        raise ConfigError(f"reward.by_set.{unknown}: no such set in eval.sets; name one of these: {known}")


def check_tasks(reward: RewardConfig, tasks: Mapping[str, str]) -> None:
    """Refuse tasks without a reward, and rewards without a task; `tasks` has the place of a problem of each.

    Raises `ConfigError`.
    """
    known = ", ".join(sorted(task for task in tasks if task)) or "none"
    for task in reward.by_task:
        if task not in tasks:
            raise ConfigError(
                f"reward.by_task.{task}: no problem has this task; name one of these, or leave it out: {known}"
            )
    for task, place in tasks.items():
        if not reward.of_task(task):
            raise ConfigError(f"{place}: task {task!r} has no reward; add it to reward.by_task, or set reward.use")
