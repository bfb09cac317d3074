"""The script of a fleet: what happens when, by random numbers of its own, on a virtual clock.

Each tick things happen in a random order: replicas generate, report and die, scores come in, the learner steps.
Whatever the controller's parts decide goes to the tape. A controller that dies ends its event loop; the next
incarnation begins from what is on disk.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random

from laminar_lab.simulate.virtual_loop import virtually
from tests.tapes.plain import Given, Look, Said, Tape, Verdict, luck
from tests.tapes.plans import Plan
from tests.tapes.production import Batch, Control, Left
from tests.tapes.pure import write_pure
from tests.tapes.replica import Replica, Weights

LAST_TICKS = 200  # after the end, until all is settled
EVALUATED = 5  # prompts of an evaluation


def play(plan: Plan, run: Path) -> list[str]:
    """The tape of a fleet; `run` is an empty folder for its ledger."""
    tape = Tape()
    write_pure(plan, tape)
    world = World(plan)
    stops = [*plan.controller_deaths, plan.ticks]
    for stop in stops:
        left = Left(run, loses_checkpoint=plan.loses_checkpoint) if stop != stops[0] else None
        if left is not None:
            left.write(tape)
        virtually(Incarnation(world, run, tape, left).live(stop, last=stop == plan.ticks))
    Left(run).write(tape)
    return tape.lines


class World:
    """State that outlives a controller."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = Random(plan.seed)
        self.weights = Weights(plan.keep)
        self.tick = 0
        self.lives = 0
        self.evaluations = 0


class Incarnation:
    """A life of the controller, with its replicas and its learner."""

    def __init__(self, world: World, run: Path, tape: Tape, left: Left | None) -> None:
        self.world, self.plan, self.tape = world, world.plan, tape
        self.random = world.random
        self.number = left.incarnation if left else 1
        self._run, self._left = run, left
        self.now = 0.0
        self._up: dict[int, Replica] = {}
        self._dead: dict[int, float] = {}  # replicas, until their next life begins
        self._starts: dict[int, float] = {}  # replicas that are starting
        self._starting: dict[int, Replica] = {}
        self._doomed: set[int] = set()
        self._planned: list[tuple[int, list[list]]] = []
        self._scores: list[Verdict] = []
        self._references: list[tuple[float, str, int]] = []
        self._late: list[Said] = []  # words of the dead
        self._ended = False
        self.news = asyncio.Event()  # there is a newer version

    async def live(self, stop: int, *, last: bool) -> None:
        """Play until this tick; stop without a word of farewell unless it is the `last`."""
        self.control = Control(self.plan, self._run, self.tape, score=self._score, refer=self._refer)
        await self.control.start(self._left)
        self._learner = Learner(self, self._left)
        if self._left is not None:
            self._adopt_all()
        await self._learner.begin()
        if self._left is None:
            self._adopt_all()
        if self.plan.repack.startswith("migration"):
            self._rounds = asyncio.create_task(self.control.rounds(self))
        while self.world.tick < stop:
            await self._tick()
        if last:
            await self._wind_up()

    async def _tick(self) -> None:
        elapsed = self.random.uniform(0.2, 0.3)
        await asyncio.sleep(elapsed)
        self.now = self.control.clock.now()
        self.world.tick += 1
        self.tape.settle()
        self.tape.write("tick", self.world.tick)
        self._bring_up()
        for index in sorted(self._up):
            self._up[index].tick(self.now, elapsed)
        acts = [self._reports, self._verdicts, self._found]
        self.random.shuffle(acts)
        for act in acts:
            await act()
        if not self._ended:
            await self._mishaps()
            await self._learner.tick(self.now)
            self._ask()
            self._repack()
        await self.control.deadlines()
        self._hand_out()
        for done in self.control.evaluated(self._learner.step):
            self.tape.write("evaluation", *done)
        if self.world.tick % 4 == 0:
            self.tape.write("look", *self.control.look())

    async def _wind_up(self) -> None:
        """End the run: replicas hand back what they have, evaluations come to their end."""
        self._ended = True
        self._learner.record(None)
        self.control.pause()
        for index in sorted(self._up):
            self._up[index].send(self.now, "stop", None)
        for _ in range(LAST_TICKS):
            await self._tick()
            if not self._starts and not self._dead and not self.control.in_flight() and not self._scores:
                break
        await self.control.finish(self.number)

    # ---- callbacks of the controller

    def _score(self, id: str, length: int, prompt: str) -> None:
        plan, drawn = self.plan, luck(self.plan.seed, id, "score")
        flat = luck(plan.seed, prompt, "flat").random() < plan.flat
        value = 1.0 if flat else drawn.randrange(5) / 4 if plan.graded else float(drawn.random() < 0.5)
        failure = None
        if drawn.random() < plan.p_fail:
            value, failure = None, drawn.choice(["reward_failed", "reward_timeout", None])
        due = self.now + drawn.expovariate(1 / plan.score_s)
        by_token = plan.by_token or (plan.teaches and drawn.random() > 0.05)
        self.tape.write("submit-score", id, length)
        self._scores.append(Verdict(due, id, length, value, failure, by_token))

    def _refer(self, id: str, length: int) -> None:
        self.tape.write("submit-reference", id, length)
        self._references.append((self.now + luck(self.plan.seed, id, "refer").uniform(0.1, 3.0), id, length))

    # ---- replicas

    def _adopt_all(self) -> None:
        for index in range(self.plan.replicas):
            self._adopt(index)

    def _adopt(self, index: int) -> None:
        """Start a process, with what it is to take up; it is there a little later."""
        initial = self.control.adopt(index)
        self._write_given("adopt", index, initial)
        self.world.lives += 1
        life = Replica(self.plan, index, life=self.world.lives, weights=self.world.weights, initial=list(initial))
        self._starts[index] = self.now + self.random.uniform(0.1, 1.6)
        self._starting[index] = life

    def _bring_up(self) -> None:
        for index in sorted(self._dead):
            if self._dead[index] <= self.now:
                del self._dead[index]
                self._adopt(index)
        for index in sorted(self._starts):
            if self._starts[index] <= self.now:
                del self._starts[index]
                self._up[index] = self._starting.pop(index)
                self.control.started(index)
                if self._ended:
                    self._up[index].send(self.now, "stop", None)

    async def _reports(self) -> None:
        order = sorted(self._up)
        self.random.shuffle(order)
        for index in order:
            if not self._up[index].urgent or self.random.random() < self.plan.p_quiet:
                continue
            told = self._up[index].report()
            late, self._late = self._late, []
            echo = [said for said in told.said if said.broken is None and self.random.random() < self.plan.p_echo]
            await self.control.reported(replace(told, said=(*late, *told.said)))
            self._late += echo
            if self.random.random() < 0.7:
                self._hand_out()

    def _hand_out(self) -> None:
        """Carry the controller's words to replicas; each hears them a little later."""
        for index, some in sorted(self.control.dispatch().items()):
            self._write_given("give", index, some)
            self._tell(index, "submit", some)
        for index, names in sorted(self.control.aborts().items()):
            self.tape.write("abort", index, names)
            self._tell(index, "abort", names)
        for index, names in sorted(self.control.called_off().items()):
            self.tape.write("called-off", index, names)
            self._tell(index, "call_off", names)

    def _tell(self, index: int, verb: str, what: object) -> None:
        replica = self._up.get(index) or self._starting.get(index)
        if replica is not None:
            replica.send(self.now + self.random.choice([0.0, 0.0, 0.3]), verb, what)

    def _write_given(self, word: str, index: int, some: list[Given]) -> None:
        self.tape.write(word, index, [given.line for given in some])

    # ---- scores and references

    async def _verdicts(self) -> None:
        due = sorted((verdict for verdict in self._scores if verdict.due <= self.now), key=lambda v: (v.due, v.id))
        self._scores = [verdict for verdict in self._scores if verdict.due > self.now]
        for verdict in due:
            wanted = self.control.wanted(verdict.id)
            if not all(wanted):
                self.tape.write("wanted", verdict.id, *wanted)
            await self.control.scored(verdict)

    async def _found(self) -> None:
        due = sorted(found for found in self._references if found[0] <= self.now)
        self._references = [found for found in self._references if found[0] > self.now]
        for _, id, length in due:
            await self.control.referred(id, length)

    # ---- what goes wrong, what is asked for

    async def _mishaps(self) -> None:
        plan, tick = self.plan, self.world.tick
        doomed, self._doomed = self._doomed, set()
        if self._up and self.random.random() < plan.p_death:
            several = min(len(self._up), self.random.choice([1, 1, 1, 2]))
            doomed |= set(self.random.sample(sorted(self._up), several))
        for index in sorted(doomed & self._up.keys()):
            await self._die(index)
        if self.random.random() < plan.p_forget:
            newest = self.world.weights.newest
            self.world.weights.forgotten.add(max(0, newest - self.random.randrange(2)))
        if tick in plan.retires:
            for index in sorted(self._up):
                self.control.retire(index)
            for index in sorted(self._up):
                await self.control.lost(index)
                del self._up[index]
                self._adopt(index)
        for at, ticks in plan.pauses:
            if tick == at:
                self._pause()
            elif tick == at + ticks:
                self.control.go_on()
                for index in sorted(self._up):
                    self._tell(index, "again", None)

    def _pause(self) -> None:
        self.control.pause()
        for index in sorted(self._up):
            self._tell(index, "stop", None)

    async def _die(self, index: int) -> None:
        """Kill a process, or its engine, which leaves it a last report."""
        replica = self._up[index]
        if self.random.random() < self.plan.p_cut:
            await self.control.reported(replica.cut(self.now))
        else:
            self._late += [said for said in replica.report().said if said.broken is None]
        self.tape.write("death", index, replica.life)
        await self.control.lost(index)
        del self._up[index]
        self._dead[index] = self.now + self.random.uniform(0.0, 1.0)
        self._hand_out()

    def _ask(self) -> None:
        for at, back in self.plan.evaluations:
            if self.world.tick == at:
                version = None if back is None else max(0, self._learner.version - back)
                self.control.evaluate(self.world.evaluations, EVALUATED, version)
                self.world.evaluations += 1
        if self.world.tick in self.plan.abandons:
            self.control.abandon()

    # ---- repacking

    def _repack(self) -> None:
        """Rounds that the script carries out: every fourth tick plans, which are carried out at the next."""
        planned, self._planned = self._planned, []
        for version, moves in planned:
            self._carry_out(version, moves)
        if self.plan.repack not in ("paper", "predictive") or self.world.tick % 4:
            return
        seen: list[Look] = []
        for version, some in self.control.peers():
            looks = [self._up[index].survey() for index in some if index in self._up]
            looks = [look for look in looks if look.version == version]
            seen += looks
            if len(looks) > 1:
                moves = self.control.plan_moves(self.plan.repack, looks, max_stall_s=self.plan.max_stall_s)
                self.tape.write("siblings", self.control.siblings())
                self.tape.write("plan", version, moves)
                self._planned.append((version, moves))
        self.control.seen(seen)

    def _carry_out(self, version: int, moves: list[list]) -> None:
        coming: dict[int, list[str]] = {}
        for name, _, destination, _ in moves:
            coming.setdefault(destination, []).append(name)
        up = {index: names for index, names in coming.items() if index in self._up}
        willing = {index for index, names in up.items() if self._up[index].expect(version, names)}
        asked = self.control.move(version, [move for move in moves if move[2] in willing])
        self.tape.write("moving", version, sorted(willing), asked)
        for source, names in asked:
            self._ask_back(source, names)
        for destination in sorted(willing):
            self._betray(destination)

    def _ask_back(self, source: int, names: list[str]) -> None:
        """Have a source give these up, sooner or later."""
        if source in self._up:
            late = luck(self.plan.seed, self.world.tick, source, "late").choice([0.0, 0.0, self.plan.slow_s])
            self._up[source].send(self.now + late, "abort", list(names))

    def _betray(self, destination: int) -> None:
        """Let a destination die over what it was promised, at times."""
        promises = (self.plan.seed, self.world.tick, destination, "betray")
        if luck(*promises).random() < self.plan.p_betray:
            self._doomed.add(destination)

    # ---- what the real rounds ask

    async def survey(self, replica: int) -> Look | None:
        """See `production.Replicas`; no two answers come at the same time."""
        await asyncio.sleep(0.0113 + 0.0017 * replica)
        return self._up[replica].survey() if replica in self._up else None

    async def expect(self, replica: int, version: int, names: list[str]) -> bool:
        """See `production.Replicas`."""
        slow = luck(self.plan.seed, self.world.tick, replica, "promise").random() < 0.3
        await asyncio.sleep(0.0071 + 0.0013 * replica + (self.plan.slow_s if slow else 0.0))
        promised = replica in self._up and self._up[replica].expect(version, list(names))
        self.tape.write("expect", replica, version, list(names), promised)
        if promised:
            self._betray(replica)
        return promised

    def give_up(self, replica: int, names: list[str]) -> None:
        """See `production.Replicas`."""
        self.tape.write("give-up", replica, list(names))
        self._ask_back(replica, names)

    async def published(self, known: int) -> int:
        """See `production.Replicas`."""
        if self.world.weights.newest <= known:
            self.news.clear()
            await self.news.wait()
        await asyncio.sleep(0.0377)
        return self.world.weights.newest


class Learner:
    """Learner that takes batches, steps, publishes, has checkpoints, dies."""

    def __init__(self, owner: Incarnation, left: Left | None) -> None:
        self.step = left.step if left else 0
        self.version = -1
        self._owner = owner
        self._left = left
        self._batch: Batch | None = None
        self._done_s = 0.0
        self._up_s: float | None = None  # it starts until then
        self._saved = (self.step, left.version if left else None)
        self._unrecorded: list[tuple[float, int, int, int | None]] = []  # due, version, step, parent

    async def begin(self) -> None:
        """Publish the first weights; those of a resumed run come later."""
        if self._left is not None:
            self._up_s = self._owner.random.uniform(0.5, 2.5)
            newest = await self._owner.control.adopt_versions(step=self.step, incarnation=self._owner.number)
            self._owner.world.weights.start_over(newest)
            return
        self._publish(None)
        await self._owner.control.checkpoint(step=0, version=self.version)
        self._saved = (0, self.version)
        self._owner.control.go_on()

    async def tick(self, now: float) -> None:
        """Let time pass."""
        control = self._owner.control
        self.record(now)
        if self._up_s is not None:
            if now >= self._up_s:
                self._up_s = None
                self._publish(self._saved[1])
                control.go_on()
            return
        if self._batch is None:
            await self._take(now)
        elif now >= self._done_s:
            batch, self._batch = self._batch, None
            if self._owner.random.random() < self._owner.plan.p_learner:
                await self._die(batch, now)
            else:
                await self._commit(batch)

    async def _take(self, now: float) -> None:
        owner, control = self._owner, self._owner.control
        if control.buffered < owner.plan.batch and owner.random.random() < 0.8:
            return
        batch = await control.take(version=self.version)
        if batch is None:
            owner.tape.write("no-batch", control.buffered)
            return
        batch.write(owner.tape, owner.plan)
        self._batch = batch
        self._done_s = now + (0.0 if batch.is_empty else owner.random.uniform(0.6, 1.4) * owner.plan.step_s)

    async def _commit(self, batch: Batch) -> None:
        owner, control = self._owner, self._owner.control
        self.step += 1
        await control.commit(batch, step=self.step, incarnation=owner.number)
        if not batch.is_empty and self.step % owner.plan.publish_every == 0:
            self._publish(self.version)
        if self.step % owner.plan.checkpoint_every == 0:
            await control.checkpoint(step=self.step, version=self.version)
            self._saved = (self.step, self.version)

    async def _die(self, batch: Batch, now: float) -> None:
        owner, control = self._owner, self._owner.control
        await control.put_back(batch)
        self.record(None)
        self.step = self._saved[0]
        undone = await control.roll_back(step=self.step)
        owner.tape.write("rolled-back", self.step, undone)
        self._up_s = now + owner.random.uniform(0.3, 1.5)

    def _publish(self, parent: int | None) -> None:
        owner = self._owner
        self.version = owner.control.publish(above=self.version)
        owner.world.weights.publish(self.version, owner.now)
        owner.news.set()
        self._unrecorded.append((owner.now + owner.plan.record_s, self.version, self.step, parent))
        self.record(owner.now)

    def record(self, now: float | None) -> None:
        """Put on record what is due; all of it, if no time is given."""
        while self._unrecorded and (now is None or self._unrecorded[0][0] <= now):
            _, version, step, parent = self._unrecorded.pop(0)
            self._owner.control.published(version, step=step, parent=parent, incarnation=self._owner.number)
