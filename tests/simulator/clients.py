"""Simulated clients: what each asks for, when it leaves, comes back or cancels, and what it must get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from slipstream.client.requests import OutputReader, can_go_on_after, job_request
from slipstream.common.errors import ConnectionLostError, ResourceExhaustedError, SlipstreamError
from slipstream.common.wire.job import FinishReason
from slipstream.gateway.request import sample_seed
from slipstream.protos import generation_pb2
from tests.simulator.model import LEAST_TOKEN, NUM_TOKENS, is_constrained, reference
from tests.simulator.processes import GatewayProcess
from tests.simulator.transport import ClientCall
from tests.simulator.world import World

PAUSE_S = 0.05
"""Between two tries of a client."""
MOST_TOKENS_AFTER_CANCEL = 30
"""Those of the steps under way, and of the cancel's way to the scheduler.

They count from what schedulers have sent: a client whose connection broke, or a gateway that was stopped, has the rest
of that still to read.
"""
_COMMON = tuple(LEAST_TOKEN + number * number % NUM_TOKENS for number in range(20))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a client does."""

    starts_at_s: float
    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int
    stops: tuple[int, ...]
    num_samples: int
    max_draft_tokens: int | None
    creates: bool
    """With CreateJob and WatchJob; else with Generate."""
    is_named: bool
    """True if it chooses the job's id."""
    leaves_after: int | None
    """Tokens after which it disconnects."""
    returns_after_s: float | None
    """Then; None is never."""
    cancels_after: int | None
    """Tokens after which it cancels the job by a call."""
    priority: int = 0

    @property
    def moves(self) -> bool:
        """True if it goes on by a `Continuation`, as at another server, wherever its call broke."""
        return not self.creates and self.cancels_after is None and self.seed % 2 == 0

    @classmethod
    def draw(cls, random: Random, *, context_tokens: int, num_draft_tokens: int) -> Plan:
        """Draws one."""
        prompt = tuple(random.randrange(LEAST_TOKEN, LEAST_TOKEN + NUM_TOKENS) for _ in range(random.randint(1, 20)))
        # Many begin alike, and share pages then.
        prompt = _COMMON[: prompt[0] % 20] + prompt[prompt[0] % 20 :] if prompt[-1] % 3 else prompt
        most = random.randint(1, 16 if random.random() < 0.9 else context_tokens - len(prompt))
        stops = random.sample(range(LEAST_TOKEN, LEAST_TOKEN + NUM_TOKENS), random.choice((0, 0, 0, 1, 4, 10)))
        what = random.random()
        creates = random.random() < 0.4
        if what > 0.9:
            # Long enough that a cancel that does nothing shows.
            most, stops = context_tokens - len(prompt), []
        return cls(
            starts_at_s=random.random() * 0.03,
            prompt=prompt,
            seed=random.getrandbits(32),
            max_new_tokens=most,
            stops=tuple(stops),
            num_samples=2 if random.random() < 0.15 else 1,
            max_draft_tokens=random.choice((0, 1)) if num_draft_tokens and random.random() < 0.2 else None,
            creates=creates,
            is_named=creates or random.random() < 0.8,
            leaves_after=random.randint(0, most) if what < 0.3 else None,
            returns_after_s=random.choice((None, 0.0, 0.01, 0.5)),
            cancels_after=random.randint(0 if creates else 1, min(most, 8)) if what > 0.8 else None,
        )


class Client:
    """A client with one job. It belongs to no process of the server."""

    def __init__(
        self,
        world: World,
        number: int,
        plan: Plan,
        find: Callable[[], GatewayProcess | None],
        *,
        can_fail: bool = False,
    ) -> None:
        """`can_fail`: the server may fail the job; the client then asks for it again, cancelled or not."""
        self.plan = plan
        self.name = f"job-{number}"
        self.is_over = False
        """True if it wants nothing any more."""
        self.num_moves = 0
        self.tokens: list[list[int]] = [[] for _ in range(plan.num_samples)]
        self.ends: list[FinishReason | None] = [None] * plan.num_samples
        self._world = world
        self._find = find
        self._reader = OutputReader(keeps_tokens=plan.moves)
        self._job_id = self.name if plan.is_named else ""
        self._generate = self._request(generation_pb2.GenerateRequest)
        self._call: ClientCall | None = None
        self._can_fail = can_fail
        self._has_created = not plan.creates
        self._has_left = self._has_cancelled = False
        self._most_tokens = 10**9
        self._expected = [
            reference(
                plan.prompt,
                seed := sample_seed(plan.seed, index),
                plan.max_new_tokens,
                plan.stops,
                has_grammar=world.has_grammars and is_constrained(seed),
            )
            for index in range(plan.num_samples)
        ]
        world.at(plan.starts_at_s, self._open)

    def _open(self) -> None:
        plan = self.plan
        if self.is_over:
            return
        if not self._has_created:
            request = self._request(generation_pb2.CreateJobRequest)
            self._start(lambda gateway, context: gateway.servicer.CreateJob(request, context), self._created)
        elif plan.creates:
            watch = self._reader.watch_request(self._job_id)
            self._start(lambda gateway, context: gateway.servicer.WatchJob(watch, context), self._read)
        else:
            if self._call is not None and plan.moves:
                self._reader.continued(self._generate)
                self.num_moves += 1
                self._job_id = self._generate.job_id
            # As it is on the wire: the servicer changes what it gets.
            generate = generation_pb2.GenerateRequest()
            generate.CopyFrom(self._reader.resumed(self._generate))
            self._start(lambda gateway, context: gateway.servicer.Generate(generate, context), self._read)
        self._look()

    def _request(self, kind: Any) -> Any:
        plan = self.plan
        return job_request(
            kind,
            plan.prompt,
            self._job_id,
            {
                "max_new_tokens": plan.max_new_tokens,
                "seed": plan.seed,
                "stop_token_ids": list(plan.stops),
                "n": plan.num_samples,
                "max_draft_tokens": plan.max_draft_tokens,
                "priority": plan.priority,
            },
        )

    def _start(self, handle: Any, on_message: Callable[[Any], None]) -> None:
        self._call = ClientCall(self._world, self._find(), handle, on_message=on_message, on_end=self._ended)

    def _created(self, _: Any) -> None:
        self._has_created = True

    def _read(self, message: Any) -> None:
        if isinstance(message, bytes):
            # As the gateway sends most chunks of plain text.
            message = generation_pb2.GenerateResponse.FromString(message)
        try:
            chunk = self._reader.read(message)
        except SlipstreamError as error:
            self._world.fail(f"{self.name}: {error}")
            return
        self._job_id = self._job_id or message.job_id
        if chunk is not None:
            index = chunk.sample_index
            self.tokens[index] += chunk.token_ids
            if self.tokens[index] != self._expected[index][: len(self.tokens[index])]:
                self._world.fail(f"{self.name}: got {self.tokens[index]}, expected {self._expected[index]}")
            if chunk.finish_reason is not None:
                self._check_end(index, chunk.finish_reason)
        self._look()

    def _check_end(self, index: int, reason: FinishReason) -> None:
        if self.ends[index] is not None:
            self._world.fail(f"{self.name}: a second end, {reason}")
        self.ends[index] = reason
        expected = self._expected[index]
        if reason is FinishReason.ABORT:
            if not self._has_cancelled:
                self._world.fail(f"{self.name}: ended with {reason}, and no client cancelled it")
        elif self.tokens[index] != expected:
            self._world.fail(f"{self.name}: ended with {self.tokens[index]}, expected {expected}")
        elif (reason is FinishReason.STOP) != (expected[-1] in self.plan.stops):
            self._world.fail(f"{self.name}: ended with {reason} after {expected}")

    def _ended(self, error: SlipstreamError | None) -> None:
        if self.is_over:
            return
        if self._reader.is_over:
            self.is_over = True
        elif error is None and self._has_created and self.plan.creates and not self._reader.is_over:
            self._world.at(0.0 if not self._count() else PAUSE_S, self._open)
        elif isinstance(error, ResourceExhaustedError) or can_go_on_after(
            error or ConnectionLostError("an end without an end")
        ):
            if self._can_fail:
                self._has_created = not self.plan.creates
            self._world.at(PAUSE_S * (0.5 + self._world.random.random()), self._open)
        else:
            self._world.fail(f"{self.name}: {error!r}")

    def _count(self) -> int:
        return sum(map(len, self.tokens))

    def _look(self) -> None:
        """Leaves or cancels if it is time to."""
        plan, count = self.plan, self._count()
        if count > self._most_tokens:
            self._world.fail(f"{self.name}: goes on after it was cancelled")
        if self._call is None or self.is_over or not self._has_created:
            return
        if plan.cancels_after is not None and count >= plan.cancels_after and not self._has_cancelled and self._job_id:
            self._has_cancelled = True
            self._cancel()
        if plan.leaves_after is not None and count >= plan.leaves_after and not self._has_left:
            self._has_left = True
            self._call.cancel()
            self._world.note(self.name, "leaves")
            if plan.returns_after_s is None:
                self.is_over = True
            else:
                self._world.at(plan.returns_after_s, self._open)

    def _cancel(self) -> None:
        request = generation_pb2.CancelJobRequest(job_id=self._job_id)
        plan = self.plan
        self._world.note(self.name, "cancels")

        def ended(error: SlipstreamError | None) -> None:
            if self._can_fail and error is None:
                pass  # a job that has failed before is asked for again, and goes on
            elif error is None:
                generated = sum(
                    self._world.num_generated.get((self._job_id, sample_seed(plan.seed, index)), 0)
                    for index in range(plan.num_samples)
                )
                self._most_tokens = generated + MOST_TOKENS_AFTER_CANCEL * plan.num_samples
            elif can_go_on_after(error) or isinstance(error, ResourceExhaustedError):
                self._world.at(PAUSE_S, self._cancel)
            elif not self.is_over:
                self._world.fail(f"{self.name}: CancelJob: {error!r}")

        ClientCall(
            self._world,
            self._find(),
            lambda gateway, context: gateway.servicer.CancelJob(request, context),  # type: ignore[union-attr]
            on_message=lambda _: None,
            on_end=ended,
        )
