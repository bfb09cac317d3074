"""A run as a simulation writes it: replicas under `drain` with long tails, repacks, a learner and two relays.

Everything goes through a real ledger, in virtual time.
"""

import heapq
from collections import defaultdict, deque

import numpy as np

from laminar_py.ledger.database import LEDGER_NAME
from laminar_py.ledger.ledger import Ledger
from laminar_py.records import events as e
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind, Prompt
from tests.builders import make_evaluated
from tests.events import finished, run_started
from tests.ledger.runs import payload_of, store
from tests.report.builders import make_fleet_row, make_step_row, write_rows

GROUP, TOKEN_S, LEARN_S, MAX_STALENESS = 8, 0.02, 3.0, 4
IDS = np.zeros(4096, np.int32)
LOGPROBS = np.zeros(4096, np.float32)


class Clock:
    def __init__(self):
        self.at = 1000.0

    def now(self):
        return self.at


class Simulation:
    """`replicas` that run `slots` trajectories each, until `steps` learner steps are done."""

    def __init__(self, ledger, clock, *, replicas, slots, steps, seed=0):
        self.ledger, self.clock, self.rng = ledger, clock, np.random.default_rng(seed)
        self.slots, self.steps = slots, steps
        self.version = self.step = self.group = self.order = self.num_live = 0
        self.per_step = max(2, replicas * slots // GROUP // 2)
        self.served = [0] * replicas
        self.running = [set() for _ in range(replicas)]
        self.where, self.epoch, self.began, self.length, self.made_by = {}, {}, {}, {}, {}
        self.scored, self.ready = defaultdict(list), deque()
        self.learning, self.held = False, []
        self.agenda = []
        self.metrics = []

    def later(self, delay_s, act, *values):
        self.order += 1
        heapq.heappush(self.agenda, (self.clock.at + delay_s, self.order, act, values))

    async def run(self):
        self.ledger.append(run_started(drain=True, max_staleness=4))
        self.publish(None)
        for replica in range(len(self.served)):
            self.ledger.append(e.PartStarted(f"replica-{replica}", 100 + replica))
            self.admit(replica)
        while self.step < self.steps:
            self.clock.at, _, act, values = heapq.heappop(self.agenda)
            act(*values)
            if act == self.learned or self.order % 50 == 0:
                await self.ledger.commit()

    def admit(self, replica):
        if self.is_full:
            self.held.append(replica)
            return
        self.served[replica] = self.version
        self.num_live += self.slots // GROUP
        for _ in range(0, self.slots, GROUP):
            group, self.group = f"g{self.group}", self.group + 1
            index = self.group
            self.ledger.store_prompt(
                Prompt(id=f"p{index}", index=index, text=f"{index} + 1 = <b>", ids=IDS[:4], answer=str(index + 1))
            )
            for sample in range(GROUP):
                id = f"{group}.{sample}"
                self.ledger.append(
                    e.Issued(
                        trajectory_id=id,
                        group_id=group,
                        prompt_id=f"p{index}",
                        prompt_index=index,
                        sample_index=sample,
                        kind=Kind.TRAIN,
                    )
                )
                self.length[id] = int(min(800, self.rng.lognormal(3.6, 0.9) + 1))
                self.epoch[id] = 0
                self.assign(id, replica, 0)

    def assign(self, id, replica, length):
        self.epoch[id] += 1
        self.ledger.append(e.Assigned(id, replica, self.epoch[id], length))
        self.where[id], self.began[id] = replica, (self.clock.at, length)
        self.running[replica].add(id)
        pace = TOKEN_S * self.rng.uniform(0.9, 1.1)
        self.later((self.length[id] - length) * pace, self.finished, id, self.epoch[id])

    def finished(self, id, epoch):
        if epoch != self.epoch[id]:
            return
        replica, (began, had) = self.where[id], self.began[id]
        version, length = self.served[replica], self.length[id]
        self.made_by[id] = version
        self.grow(id, had, length, version)
        self.running[replica].discard(id)
        took = self.clock.at - began
        span = (Span(version, 0, length),)
        self.ledger.append(finished(id, span, epoch=epoch, digest="d", queue_s=0.1 * took, generate_s=took))
        self.later(self.rng.exponential(0.2), self.score, id)
        if not self.running[replica]:
            self.refresh(replica)
        elif len(self.running[replica]) == 3:
            self.repack(replica)

    def grow(self, id, start, end, version):
        if end > start:
            tokens = end - start
            spans = (Span(version, start, end),)
            store(self.ledger, id, start, end, spans, ids=IDS[:tokens], logprobs=LOGPROBS[:tokens])

    def repack(self, source):
        version = self.served[source]
        others = [r for r, v in enumerate(self.served) if v == version and r != source and self.running[r]]
        if not others or self.version == version:
            return
        destination = max(others, key=lambda r: len(self.running[r]))
        moved = sorted(self.running[source])
        for id in moved:
            began, had = self.began[id]
            length = min(self.length[id] - 1, had + int((self.clock.at - began) / TOKEN_S))
            self.grow(id, had, max(had, length), version)
            interrupted = e.Interrupted(
                trajectory_id=id, epoch=self.epoch[id], length=max(had, length), reason="repacked"
            )
            self.ledger.append(interrupted)
            self.running[source].discard(id)
            self.assign(id, destination, max(had, length))
        self.ledger.append(
            e.Repacked(
                version=version,
                num_running=len(moved),
                num_waiting=0,
                sources=(source,),
                prefill=100,
                elapsed_s=0.1,
            )
        )
        self.refresh(source)

    def refresh(self, replica):
        digest = f"digest{self.version}"
        self.ledger.append(e.Pulled(f"relay-{1 + replica % 2}", f"replica-{replica}", self.version, 0.01))
        self.ledger.append(e.VersionLoaded(replica=replica, version=self.version, digest=digest, elapsed_s=0.3))
        self.later(0.3, self.admit, replica)

    def score(self, id):
        reward = float(self.rng.random() < 0.4 + 0.5 * self.step / self.steps)
        self.ledger.append(e.Scored(trajectory_id=id, reward=reward, elapsed_s=float(self.rng.exponential(0.05))))
        group = id.partition(".")[0]
        self.scored[group].append((id, reward))
        if len(self.scored[group]) == GROUP:
            self.close(group)

    def close(self, group):
        members = self.scored.pop(group)
        if len({reward for _, reward in members}) == 1:
            for id, _ in members:
                self.ledger.append(e.Dropped(id, DropReason.NO_SIGNAL))
            self.num_live -= 1
            self.let_in()
            return
        for id, _ in members:
            self.ledger.append(e.Ready(id, 0.5))
        self.ready.append(members)
        self.learn()

    def learn(self):
        if not self.learning and len(self.ready) >= self.per_step:
            self.learning = True
            self.later(LEARN_S, self.learned, [self.ready.popleft() for _ in range(self.per_step)])

    def learned(self, batch):
        self.step, self.learning = self.step + 1, False
        ids = [id for members in batch for id, _ in members]
        tokens = sum(self.length[id] for id in ids)
        used = [
            e.Consumed(
                trajectory_id=id,
                step=self.step,
                version=self.version,
                staleness=self.version - self.made_by[id],
                weight=1.0,
            )
            for id in ids
        ]
        reward = float(np.mean([reward for members in batch for _, reward in members]))
        self.ledger.append_all(
            [
                e.Stepped(
                    step=self.step,
                    incarnation=1,
                    num_trajectories=len(ids),
                    num_tokens=tokens,
                    loss=0.1,
                    grad_norm=0.2,
                    reward=reward,
                    elapsed_s=LEARN_S,
                    waited_s=0.5,
                    reference_s=0.2,
                ),
                *used,
            ]
        )
        found = {"reward": reward, "entropy": 1 / self.step, "trained_tokens": tokens, "generated_tokens": tokens}
        self.metrics.append(make_step_row(self.step, self.clock.at - 1000, **found))
        self.publish(self.version)
        if self.step % 5 == 0:
            accuracy = self.step / self.steps
            found = {"step": self.step, "version": self.version, "index": self.step, "problems": 100}
            self.ledger.append(make_evaluated(accuracy, rl_s=self.clock.at - 1000, **found))
        self.num_live -= len(batch)
        self.let_in()
        self.learn()

    @property
    def is_full(self):
        return self.num_live >= (1 + MAX_STALENESS) * self.per_step

    def let_in(self):
        while self.held and not self.is_full:
            self.refresh(self.held.pop(0))

    def publish(self, parent):
        self.version = 0 if parent is None else parent + 1
        digest = f"digest{self.version}"
        self.ledger.append(
            e.VersionPublished(
                version=self.version,
                step=self.step,
                incarnation=1,
                parent=parent,
                digest=digest,
                num_bytes=10**6,
                stall_s=0.01,
            )
        )
        for node, above, took in ((0, "", 0.0), (1, "relay-0", 0.08), (2, "relay-1", 0.15)):
            event = e.Relayed(
                node=f"relay-{node}",
                version=self.version,
                digest=digest,
                num_bytes=10**6,
                base=parent,
                wire_bytes=10**5,
                first_byte_s=took / 4,
                elapsed_s=took,
                parent=above,
            )
            self.ledger.append(event)


async def simulate(run, *, replicas=3, slots=32, steps=6, seed=0, close=True):
    """Write a run to the folder `run`, which is made; without `close` it goes on, as far as the ledger knows."""
    run.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    ledger = Ledger(run / LEDGER_NAME, host="host-1", clock=clock)
    await ledger.start()
    simulation = Simulation(ledger, clock, replicas=replicas, slots=slots, steps=steps, seed=seed)
    await simulation.run()
    if close:
        ledger.append(e.RunEnded(1, "finished"))
    await ledger.close()
    payload_of(ledger).end_segment()
    write_rows(run / "metrics.jsonl", simulation.metrics)
    running = [len(ids) for ids in simulation.running]
    write_rows(run / "fleet.jsonl", [make_fleet_row(clock.at - 1000, running, [0.5] * replicas)])
