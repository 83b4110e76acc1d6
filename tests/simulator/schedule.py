"""A schedule: a server, its clients and its faults, all drawn from one seed; and the oracle."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from slipstream.common.wire.manifest import EVENT, HOST
from slipstream.common.wire.step import Role, RowTokens
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.draft_session import DraftSession
from tests.harness.workers import describe
from tests.simulator.clients import Client, Plan
from tests.simulator.faults import TYPICAL_EVENTS, Fault, Faults
from tests.simulator.grammar import SimulatedGrammar
from tests.simulator.memory import Host
from tests.simulator.processes import GatewayProcess, Machine, SchedulerProcess
from tests.simulator.substitutes import substituted
from tests.simulator.worker_epochs import DraftSkill
from tests.simulator.workers import HIDDEN_WIDTH, SimulatedWorker
from tests.simulator.world import SimulationError, World

CONTEXT_TOKENS = 64
END_S = 240.0
"""On the world's clock: every schedule is over by then. A call to a worker that hangs takes 60 s."""
QUIET_S = 240.0
"""After the last client's end."""
_MIB = 2**20


@dataclass(frozen=True)
class Result:
    """What came of a schedule."""

    seed: int
    digest: int
    """The same for two runs of one schedule."""
    num_events: int
    num_faults: int
    num_tokens: int
    num_moves: int
    """Calls by which clients went on with a Continuation, as at another server."""


class Schedule:
    """One run, from its seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = World(seed)
        random = Random(f"setting {seed}")
        self.has_draft = random.random() < 0.8
        self.num_faults = random.choice((0, 1, 1, 2, 2, 3, 4))
        self.skill = DraftSkill(
            reads_hidden=random.random() < 0.4,
            quality=random.choice((0.0, 0.5, 0.9, 1.0)),
        )
        self.fence_kind = EVENT if random.random() < 0.2 else HOST
        self.page_tokens = random.choice((3, 4, 8))
        self.config = SchedulerConfig(
            verify="unix:/verify",
            draft="unix:/draft" if self.has_draft else None,
            run_ahead=random.choice((0, 1, 1, 2)),
            slots=random.choice((1, 2, 4)),
            context_tokens=CONTEXT_TOKENS,
            kv_memory_mib=1,
            page_tokens=self.page_tokens,
            max_batched_tokens=random.choice((5, 16)),
            fixed_draft_tokens=random.choice((1, 2, 4)),
            step_timeout_s=5.0,
            draft_timeout_ms=random.choice((None, 50.0)),
            debug=random.random() < 0.7,
        )
        self.queue = random.choice((2, 100, 100))
        # Some have room for one long sequence only: they wait for pages.
        self.num_contexts = random.choice((1.0, 1.5, 4.0))
        if self.skill.quality == 1.0:
            self.skill = DraftSkill(reads_hidden=self.skill.reads_hidden, quality=1.0, is_watched=True)
        self.plans = [
            Plan.draw(
                random, context_tokens=CONTEXT_TOKENS, num_draft_tokens=self.config.draft_tokens(RowTokens.RAGGED)
            )
            for _ in range(random.randint(1, 6))
        ]
        self._lack_pages(Random(f"pages {seed}"))
        if self.skill.is_watched and any(plan.max_draft_tokens == 0 for plan in self.plans):
            # Plain steps leave gaps in what a draft knows.
            self.skill = DraftSkill(reads_hidden=self.skill.reads_hidden, quality=1.0)
        self.num_swaps = random.choice((0, 0, 1, 3)) if self.has_draft else 0
        self.faults = Faults.draw(random, self.num_faults, num_swaps=self.num_swaps)
        self.other_skill = DraftSkill(
            reads_hidden=random.random() < 0.4,
            quality=1.0 if self.skill.is_watched else random.choice((0.0, 0.5, 1.0)),
            is_watched=self.skill.is_watched,
            is_paged=seed % 4 > 0,
        )
        self._shorten_contexts(Random(f"contexts {seed}"))
        self.mixes = Random(f"mixed steps {seed}").random() < 0.8
        self.is_ragged = Random(f"ragged steps {seed}").random() < 0.7
        self.is_even = Random(f"even steps {seed}").random() < 0.5
        if random.random() < 0.4:
            # Drafts rest and come back at random, see `substitutes`.
            most = None if Random(f"draft tokens {seed}").random() < 0.5 else self.config.fixed_draft_tokens
            self.config = replace(self.config, fixed_draft_tokens=None, num_draft_tokens=most)
        self.outage_timeout_s = 600.0
        self.can_fail = False
        """True if the server may fail jobs, which their clients ask for again."""
        self._lack_room(Random(f"room {seed}"))
        self._constrain(Random(f"grammars {seed}"))
        self.faults.set_clocks(Random(f"clocks {seed}"))

    def _constrain(self, random: Random) -> None:
        """Has sequences of some schedules keep to a grammar, whose worker is lost, late, or lies."""
        if self.fence_kind != HOST or random.random() < 0.6:
            return
        self.world.has_grammars = True
        # A draft knows nothing of grammars: it guesses wrong.
        self.skill, self.other_skill = (replace(one, is_watched=False) for one in (self.skill, self.other_skill))
        self.config = replace(self.config, grammar="unix:/grammar", grammar_timeout_ms=random.choice((None, 50.0)))
        self.faults.lose_grammars(random)

    def _lack_room(self, random: Random) -> None:
        """Has some schedules fail jobs: the disk is full, the scheduler's queue is, or an outage takes too long."""
        what = random.random()
        if what < 0.1:
            self.faults.faults += [
                Fault(random.randrange(TYPICAL_EVENTS), "full", "gateway", random.choice((0.001, 0.01, 0.1)))
                for _ in range(random.choice((1, 2)))
            ]
        elif what < 0.15:
            self.config = replace(self.config, max_sequences=random.choice((2, 3)))
        elif what < 0.25:
            self.outage_timeout_s = random.choice((0.001, 0.01, 0.1))
        self.can_fail = what < 0.25

    def _shorten_contexts(self, random: Random) -> None:
        """Has drafts of some schedules be for shorter sequences than verify."""
        contexts = [random.choice((512, 512, 48, 24, 12)) for _ in range(2)]
        self.skill = replace(self.skill, context_tokens=contexts[0])
        self.other_skill = replace(self.other_skill, context_tokens=contexts[1])

    def _lack_pages(self, random: Random) -> None:
        """Has long outputs share the pages of one in some of the schedules, so that sequences are preempted."""
        if random.random() < 0.7:
            return
        self.num_contexts = random.choice((1.0, 1.2))
        self.config = replace(self.config, slots=random.choice((2, 4)))
        self.plans = [
            replace(
                plan,
                max_new_tokens=CONTEXT_TOKENS - len(plan.prompt),
                stops=plan.stops[:1],
                priority=random.choice((0, 0, 0, 1, -1)),
            )
            if random.random() < 0.8
            else plan
            for plan in self.plans
        ]

    def run(self) -> Result:
        """Runs it. Raises SimulationError, with the seed and the story, unless the oracle is content."""
        with substituted(self.world), tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            machine = self._machine(Path(directory))
            try:
                return self._run(machine)
            except SimulationError as error:
                story = "\n".join(self.world.notes)
                raise SimulationError(f"seed {self.seed}: {error}\n{story}") from None
            finally:
                for process in machine.all:
                    process.on_lost.clear()
                    process.kill()

    def _run(self, machine: Machine) -> Result:
        world = self.world
        drafts = ["draft"] * self.has_draft + ["other-draft"] * bool(self.num_swaps)
        grammars = ["grammar"] * self.world.has_grammars
        for name in ("verify", *drafts, *grammars, "scheduler", "gateway"):
            machine.start(name)
        clients = [
            Client(world, number, plan, lambda: machine.find("gateway"), can_fail=self.can_fail)
            for number, plan in enumerate(self.plans)
        ]
        self.faults.plant(machine)
        until = world.now + END_S
        world.run(lambda: all(client.is_over for client in clients), until=until)
        world.note("all clients are content")
        world.run(lambda: self._is_quiet(machine), until=world.now + QUIET_S)
        num_tokens = sum(len(tokens) for client in clients for tokens in client.tokens)
        num_moves = sum(client.num_moves for client in clients)
        return Result(self.seed, world.digest, world.num_events, self.faults.num_done, num_tokens, num_moves)

    def _machine(self, directory: Path) -> Machine:
        world = self.world
        host = Host(world)
        row_tokens = RowTokens.RAGGED if self.is_ragged else RowTokens.EVEN if self.is_even else RowTokens.WHOLE
        ahead = max(20, (self.config.run_ahead + 1) * (self.config.draft_tokens(row_tokens) + 1))
        needed = -(-(CONTEXT_TOKENS + ahead) // self.page_tokens) + 1
        num_pages = int(needed * self.num_contexts) + 2
        bytes_per_token = max(1, _MIB // (num_pages * self.page_tokens * (2 if self.has_draft else 1)))

        def worker(name: str, role: Role, skill: DraftSkill) -> SimulatedWorker:
            width = HIDDEN_WIDTH if role is Role.VERIFY or skill.reads_hidden else 0
            pid = len(world.processes) + 1
            description = describe(
                role,
                kv_bytes_per_token=bytes_per_token,
                hidden_width=width,
                pid=pid,
                has_paged_kv=role is Role.VERIFY or skill.is_paged,
                takes_mixed_steps=self.mixes,
                takes_ragged_steps=self.is_ragged,
                takes_even_steps=self.is_even,
                takes_masks=True,
                max_context_tokens=512 if role is Role.VERIFY else skill.context_tokens,
            )
            return SimulatedWorker(world, name, host, description, skill, self.fence_kind)

        def find(address: str) -> SimulatedWorker | None:
            found: SimulatedWorker | None = machine.find(address.removeprefix("unix:/"))
            return found

        def scheduler() -> SchedulerProcess:
            process = SchedulerProcess(world, host, self.config, find, self.fence_kind)
            process.on_verify_lost = self._verify_lost
            return process

        machine = Machine(
            world,
            host,
            {
                "verify": partial(worker, "verify", Role.VERIFY, self.skill),
                "draft": partial(worker, "draft", Role.DRAFT, self.skill),
                "other-draft": partial(worker, "other-draft", Role.DRAFT, self.other_skill),
                "grammar": lambda: SimulatedGrammar(world, host, describe(Role.GRAMMAR, pid=len(world.processes) + 1)),
                "scheduler": scheduler,
                "gateway": lambda: GatewayProcess(
                    world,
                    directory / "journal",
                    lambda: machine.find("scheduler"),
                    queue=self.queue,
                    outage_timeout_s=self.outage_timeout_s,
                ),
            },
        )
        return machine

    @staticmethod
    def _is_quiet(machine: Machine) -> bool:
        """True if every slot, page and sequence is given back."""
        gateway, scheduler = machine.find("gateway"), machine.find("scheduler")
        if gateway is None or scheduler is None or gateway.servicer is None or scheduler.epoch is None:
            return False
        batch = scheduler.epoch.batch
        return bool(
            gateway.manager._is_complete
            and not gateway.manager._alive
            and not gateway.link._samples
            and not gateway.link.running
            and not gateway.link.num_waiting
            and not scheduler.queue.num_held
            and not len(scheduler.queue)
            and not batch.num_running
            and batch.slots.num_free == batch.slots.num_slots
            and batch.pages.num_free == batch.pages.num_pages
            and not batch.pages._references
            and not batch._page_lists._unsent
            and not batch._prompts.sequences
            and not batch._preempted
            and not batch.accounts.lengths._under_way
            and Schedule._has_draft(scheduler.session.drafts)
        )

    @staticmethod
    def _has_draft(drafts: DraftSession) -> bool:
        """True if the draft that is wanted drafts, and no other is held."""
        is_well = not drafts.target.address or drafts.status.state == "attached"
        return is_well and drafts._swap is None and all(draft.cause is None for draft in drafts._drafts)

    def _verify_lost(self, reason: str) -> None:
        if self.fence_kind == HOST and not self.faults.may_end_an_epoch:
            self.world.fail(f"an epoch ended for a fault of a draft: {reason}")


def run_schedule(seed: int) -> Result:
    """Runs the schedule of a seed."""
    return Schedule(seed).run()
