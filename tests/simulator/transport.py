"""The connections between gateway and scheduler and between client and gateway, as gRPC over a socket keeps them.

A stream of gRPC delivers messages in order, each once, and none behind a gap: it can be late, and it can break. When it
breaks, each side loses what was on the way to it and learns of the break at a time of its own; the other side may have
acted on a message whose answer is lost, and the gateway's next stream may begin before the scheduler has seen the end
of the last one. So messages are lost at the end of a stream, sequences are submitted twice on two streams, and output
of the old one is on the way late: that is all that loss, duplication and reordering can be here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from slipstream.common.errors import ConnectionLostError, SlipstreamError
from slipstream.gateway.scheduler import Message, SchedulerGoneError, take_all
from tests.simulator.model import is_constrained

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from slipstream.protos import scheduler_pb2
    from tests.simulator.processes import GatewayProcess, SchedulerProcess
    from tests.simulator.world import Process, World

HALF_OPEN_S = 0.3
"""At most so long one side takes a broken connection for a good one."""


class Pipe:
    """One direction of a stream: in order, until it breaks."""

    def __init__(self, world: World, target: Process | None) -> None:
        """`target`: the process that receives; None is outside of all."""
        self._world = world
        self._target = target
        self._arrives = 0.0
        self.is_broken = False

    def send(self, call: Callable[..., None], *arguments: Any) -> None:
        """Has `call` called at the other end, unless the pipe breaks before."""
        self._arrives = max(self._arrives, self._world.now + self._world.latency())
        self._world.schedule(self._arrives - self._world.now, self._target, self._arrive, (call, arguments))

    def _arrive(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.is_broken:
            call(*arguments)

    def break_off(self, then: Callable[[], None]) -> None:
        """What has not arrived by the time when this end sees the break is lost. `then` is called at that time."""
        world = self._world
        delay_s = world.random.random() * HALF_OPEN_S if world.chance(0.3) else world.latency()
        world.schedule(delay_s, self._target, self._see_break, (then,))

    def _see_break(self, then: Callable[[], None]) -> None:
        if not self.is_broken:
            self.is_broken = True
            then()


class SimulatedConnection:
    """Stands in for `SchedulerConnection`."""

    def __init__(self, gateway: GatewayProcess, find: Callable[[], SchedulerProcess | None]) -> None:
        self._gateway = gateway
        self._find = find
        self.stream: SimulatedRunStream | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open(self) -> SimulatedRunStream:
        """See `SchedulerConnection.open`."""
        self.stream = SimulatedRunStream(self._gateway, self._find())
        return self.stream

    def describe(self) -> scheduler_pb2.SchedulerDescription:
        """See `SchedulerConnection.describe`; clients of the simulation ask for no state."""
        raise NotImplementedError


class SimulatedRunStream:
    """Stands in for `SchedulerStream`: a call of the real servicer's `Run`."""

    def __init__(self, gateway: GatewayProcess, scheduler: SchedulerProcess | None) -> None:
        self._gateway = gateway
        self._scheduler = scheduler
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._requests: deque[scheduler_pb2.RunRequest | None] = deque()
        self._requested: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._outputs: dict[int, tuple[tuple[str, int], int]] = {}
        """The sequences by their ids: job and seed, and the tokens of output."""
        self._is_broken = False
        self._down = Pipe(gateway.world, gateway)
        self._up = Pipe(gateway.world, scheduler)
        if scheduler is None or not scheduler.is_alive:
            gateway.soon(self._put, SchedulerGoneError("no connection"))
            return
        gateway.on_lost.append(self.break_off)
        scheduler.on_lost.append(self.break_off)
        self._up.send(self._begin)

    # The gateway's side.

    def send(self, request: scheduler_pb2.RunRequest) -> None:
        """See `SchedulerStream.send`."""
        self._up.send(self._take, request)

    async def receive(self) -> list[Message]:
        """See `SchedulerStream.receive`."""
        return await take_all(self._inbox)

    def close(self) -> None:
        """See `SchedulerStream.close`."""
        self._down.is_broken = True
        self.break_off()

    def break_off(self) -> None:
        """The connection breaks."""
        if not self._is_broken:
            self._is_broken = True
            self._down.break_off(lambda: self._put(SchedulerGoneError("the connection broke")))
            self._up.break_off(self._cancel)

    def _put(self, message: Message) -> None:
        self._gateway.loop.run_call(self._inbox.put_nowait, message)

    # The scheduler's side.

    def _begin(self) -> None:
        assert self._scheduler is not None
        if self._scheduler.servicer is None:
            self._down.send(self._put, SchedulerGoneError("not listening yet"))
            return
        self._requested = asyncio.Event()
        self._task = self._scheduler.loop.run_call(self._scheduler.loop.create_task, self._serve())

    def _take(self, request: scheduler_pb2.RunRequest | None) -> None:
        self._requests.append(request)
        for sequence in () if request is None else request.sequences:
            if self._gateway.world.has_grammars and is_constrained(sequence.sampling.seed):
                sequence.grammar = "a grammar"
            self._outputs[sequence.id] = (sequence.job_id, sequence.sampling.seed), len(sequence.output)
        if self._requested is not None and self._scheduler is not None:
            self._scheduler.loop.run_call(self._requested.set)

    def _cancel(self) -> None:
        if self._task is not None and self._scheduler is not None:
            self._scheduler.loop.run_call(self._task.cancel)

    async def write(self, response: scheduler_pb2.RunResponse) -> None:
        """See `grpc.aio.ServicerContext.write`, as the servicer's context."""
        self._count(response.output)
        self._down.send(self._put, response)

    def _count(self, step: scheduler_pb2.StepOutput) -> None:
        """Notes for the oracle how much output there is, whether or not a gateway ever reads it."""
        generated = self._gateway.world.num_generated
        for number, num_new in zip(step.sequences, step.num_tokens, strict=True):
            key, num_tokens = self._outputs[number]
            self._outputs[number] = key, num_tokens + num_new
            generated[key] = max(generated.get(key, 0), num_tokens + num_new)

    async def _iterate(self) -> AsyncIterator[scheduler_pb2.RunRequest]:
        assert self._requested is not None
        while True:
            while self._requests:
                if (request := self._requests.popleft()) is None:
                    return
                yield request
            self._requested.clear()
            await self._requested.wait()

    async def _serve(self) -> None:
        assert self._scheduler is not None
        assert self._scheduler.servicer is not None
        reason = "the scheduler ended the stream"
        try:
            await self._scheduler.servicer.Run(self._iterate(), self)
        except SlipstreamError as error:
            reason = str(error)
            self._gateway.world.fail(f"the scheduler ended a gateway's stream: {error}")
        self._down.send(self._put, SchedulerGoneError(reason))


class ClientCall:
    """A call of a client to the gateway's real servicer. `on_end` gets the error, if there is one, once."""

    def __init__(
        self,
        world: World,
        gateway: GatewayProcess | None,
        handle: Callable[[GatewayProcess, Any], Coroutine[Any, Any, Any]],
        *,
        on_message: Callable[[Any], None],
        on_end: Callable[[SlipstreamError | None], None],
    ) -> None:
        """`handle` makes the servicer's coroutine of the process and the call's context."""
        self._world = world
        self._gateway = gateway
        self._handle = handle
        self._on_message = on_message
        self._on_end = on_end
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self._down = Pipe(world, None)
        if gateway is None or not gateway.is_alive or gateway.servicer is None:
            world.at(world.latency(), self._end, ConnectionLostError("no gateway"))
            return
        gateway.on_lost.append(lambda: self._down.break_off(lambda: self._end(ConnectionLostError("broken"))))
        gateway.soon(self._begin)

    def cancel(self) -> None:
        """The client goes away: what is on its way to it is lost."""
        self._is_over = True
        if self._gateway is not None:
            self._gateway.soon(self._cancel)

    # What a handler sees of its context.

    def peer(self) -> str:
        """See `grpc.aio.ServicerContext.peer`."""
        return "client"

    def time_remaining(self) -> float | None:
        """See `grpc.aio.ServicerContext.time_remaining`."""
        return None

    async def write(self, message: Any) -> None:
        """See `grpc.aio.ServicerContext.write`; it has to wait now and then, as gRPC's buffer is full."""
        self._down.send(self._message, message)
        if self._world.chance(0.1):
            await asyncio.sleep(self._world.latency())

    def _begin(self) -> None:
        assert self._gateway is not None
        if not self._is_over:
            self._task = self._gateway.loop.run_call(self._gateway.loop.create_task, self._run())

    def _cancel(self) -> None:
        if self._task is not None and self._gateway is not None:
            self._gateway.loop.run_call(self._task.cancel)

    async def _run(self) -> None:
        assert self._gateway is not None
        error: SlipstreamError | None = None
        try:
            answer = await self._handle(self._gateway, self)
            if answer is not None:
                self._down.send(self._message, answer)
        except SlipstreamError as raised:
            error = raised
        self._down.send(self._end, error)

    def _message(self, message: Any) -> None:
        if not self._is_over:
            self._on_message(message)

    def _end(self, error: SlipstreamError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_end(error)
