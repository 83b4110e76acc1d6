"""Messages of requests: what a call without a turn may send, who gets turns, how many fields, turns of the loop."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipstream.benchmarks.probes import MIB, HalfMessages, hostile_requests
from slipstream.common.errors import InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from slipstream.common.rpc import loop_turns as loop_turns_module
from slipstream.common.rpc.interceptor import HEALTH_SERVICE, ServerInterceptor, refusing
from slipstream.common.rpc.loop_turns import MANY_WAITING, SLICE_S, WOKEN_IN_A_TURN, LoopTurns
from slipstream.common.rpc.receive import (
    MAX_ARRIVING_OF_A_CLIENT,
    MAX_FIELDS,
    MAX_NUMBERS,
    MAX_REQUEST_STREAMS,
    WINDOW_BYTES,
    ReceiveTurns,
    Turn,
    check_num_fields,
)
from slipstream.common.rpc.serving import MAX_HEALTH_WATCHES, MAX_RECEIVE_BYTES
from slipstream.protos import generation_pb2
from tests.harness.grpc_server import bytes_service, running_server
from tests.harness.waiting import until

ECHO = "/test.Echo/echo"
HEALTH = f"/{HEALTH_SERVICE}/Check"
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
NUM_CALLS = 40
SILENT_S = 0.4
"""A client that twice could send nothing for so long has sent all that it may."""


class Refusing(ServerInterceptor):
    """Refuses all calls."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Replaces the handler."""
        return refusing(await continuation(handler_call_details), UnauthenticatedError("no key"))


async def echo(request: bytes, context: Any) -> bytes:
    """Answers with the request."""
    return request


@pytest.fixture
def service() -> tuple[str, Any, object]:
    """Echoes."""
    return bytes_service("test.Echo", echo=grpc.unary_unary_rpc_method_handler(echo))


async def sent(address: str, path: str, *, num_calls: int = NUM_CALLS) -> list[int]:
    """The bytes that each of many calls could send of a message whose end never comes."""
    with HalfMessages(address, MAX_RECEIVE_BYTES - 1024) as client:
        for _ in range(num_calls):
            client.call(path)
        progress = [[0], [1]]
        while progress[-1] != progress[-3:][0]:
            await asyncio.to_thread(client.send, SILENT_S)
            progress.append(list(client.num_sent.values()))
        return progress[-1]


async def test_a_call_that_is_refused_sends_a_window_at_most(service: Any) -> None:
    async with running_server(service, interceptors=[Refusing()]) as server:
        assert max(await sent(server.address, ECHO)) <= WINDOW_BYTES


async def test_a_client_has_a_few_messages_that_arrive_and_others_are_served(service: Any) -> None:
    async with running_server(service) as server, grpc.aio.insecure_channel(server.address) as channel:
        sending = asyncio.create_task(sent(server.address, ECHO))
        assert await channel.unary_unary(ECHO)(bytes(2**20), timeout=10) == bytes(2**20)
        beyond = [number for number in await sending if number > WINDOW_BYTES]
        assert len(beyond) == MAX_ARRIVING_OF_A_CLIENT


async def test_large_messages_of_one_client_all_arrive(service: Any) -> None:
    async with running_server(service) as server, grpc.aio.insecure_channel(server.address) as channel:
        calls = (channel.unary_unary(ECHO)(bytes(2**20), timeout=30) for _ in range(NUM_CALLS))
        assert {len(answer) for answer in await asyncio.gather(*calls)} == {2**20}


async def test_a_request_without_a_message_is_refused(service: Any) -> None:
    async with running_server(service) as server, grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="got none, accepted: a message"):
            await channel.stream_unary(ECHO)(iter(()))


async def test_unfinished_health_checks_keep_no_other_from_its_answer() -> None:
    async with running_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        sending = asyncio.create_task(sent(server.address, HEALTH, num_calls=200))
        stub, answers = health_pb2_grpc.HealthStub(channel), []
        while not sending.done():
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            answers.append(answer.status)
        assert set(answers) == {health_pb2.HealthCheckResponse.SERVING}
        assert max(await sending) > WINDOW_BYTES


async def test_watches_of_health_are_bounded() -> None:
    async with running_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_HEALTH_WATCHES)]
        await asyncio.gather(*(watch.read() for watch in watches))
        async with grpc.aio.insecure_channel(server.address, options=OWN_CONNECTION) as another:
            late = health_pb2_grpc.HealthStub(another)
            with pytest.raises(grpc.aio.AioRpcError, match="1024 calls of Watch are open"):
                await late.Watch(health_pb2.HealthCheckRequest()).read()
            assert await late.Check(health_pb2.HealthCheckRequest()) is not None
            server.set_serving(False)
            assert {(await watch.read()).status for watch in watches} == {health_pb2.HealthCheckResponse.NOT_SERVING}


async def test_streams_of_requests_are_bounded() -> None:
    async with running_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        streams = [stub.ServerReflectionInfo() for _ in range(MAX_REQUEST_STREAMS)]
        for stream in streams:
            await stream.write(request)
            await stream.read()
        with pytest.raises(grpc.aio.AioRpcError, match="64 streams of requests are open"):
            await stub.ServerReflectionInfo(iter([request])).read()
        await streams.pop().done_writing()


class Arriving:
    """A message that has a turn, and arrives until it is told."""

    def __init__(self, turns: ReceiveTurns, client: str) -> None:
        self._turns = turns
        self._arrives = asyncio.Event()
        self.client = client
        self.turn: Turn | None = None
        self.task = asyncio.create_task(self._receive())

    @property
    def has_turn(self) -> bool:
        """True from the turn's beginning on."""
        return self.turn is not None

    async def arrive(self) -> None:
        """Ends the turn well."""
        self._arrives.set()
        await self.task

    async def _receive(self) -> None:
        async with asyncio.timeout(60) as arrival:
            self.turn = await self._turns.take(self.client)
            try:
                self.turn.arrival = arrival
                await self._arrives.wait()
            finally:
                self._turns.end(self.turn)


async def begun(turns: ReceiveTurns, *clients: str) -> list[Arriving]:
    """Messages of these clients, in order, that have or wait for a turn."""
    messages = [Arriving(turns, client) for client in clients]
    for _ in range(3):
        await asyncio.sleep(0)
    return messages


async def test_clients_take_turns() -> None:
    turns = ReceiveTurns(2, 2, 60.0)
    messages = await begun(turns, "a", "a", "a", "a", "b", "c")
    order = []
    while waiting := [message for message in messages if not message.task.done()]:
        arrives = next(message for message in waiting if message.has_turn)
        order.append(arrives.client)
        await arrives.arrive()
        await begun(turns)
    assert order == ["a", "a", "a", "b", "a", "c"]


async def test_a_client_has_no_more_than_its_part() -> None:
    messages = await begun(ReceiveTurns(3, 2, 60.0), "a", "a", "a", "b", "b")
    assert [message.has_turn for message in messages] == [True, True, False, True, False]
    await messages[3].arrive()
    await begun(ReceiveTurns(1, 1, 1.0))
    assert [message.has_turn for message in messages] == [True, True, False, True, True]
    for message in messages:
        message.task.cancel()


@pytest.mark.parametrize(("waits", "given_up"), [("a", 0), ("b", None), ("c", None)])
async def test_the_oldest_message_that_holds_up_a_waiting_one_is_given_up(waits: str, given_up: int | None) -> None:
    turns = ReceiveTurns(4, 2, 0.25)
    messages = await begun(turns, "a", "a", "b", waits)
    if given_up is None:
        assert messages[3].has_turn
        await asyncio.sleep(0.3)
        assert not any(message.task.done() for message in messages)
    else:
        assert not messages[3].has_turn
        await until(lambda: messages[3].has_turn)
        with pytest.raises(TimeoutError):
            await messages[given_up].task
        assert not messages[1].task.done()
    for message in messages:
        message.task.cancel()


async def test_the_client_with_the_most_waiting_calls_loses_one() -> None:
    messages = await begun(ReceiveTurns(1, 1, 60.0, max_waiting=3), "a", "a", "a", "b", "c")
    assert [message.task.done() for message in messages] == [False, True, False, False, False]
    with pytest.raises(ResourceExhaustedError, match="too many calls wait") as caught:
        await messages[1].task
    assert caught.value.retry_after_ms
    for message in messages:
        message.task.cancel()


async def test_a_cancelled_call_waits_no_more_and_a_turn_that_it_just_got_passes_on() -> None:
    turns = ReceiveTurns(1, 1, 60.0)
    first, second, third, fourth = await begun(turns, "a", "b", "c", "d")
    second.task.cancel()
    await begun(turns)
    await first.arrive()  # gives the third its turn, of which its task does not know yet
    third.task.cancel()
    await begun(turns)
    assert fourth.has_turn
    await fourth.arrive()


KIND = generation_pb2.GenerateRequest.DESCRIPTOR
NAMES = tuple(hostile_requests(0))
REFUSED = {
    "input_ids": r"input_ids\.ids: got '3145728 numbers'",
    "stop_token_ids": r"sampling_params\.stop_token_ids: got '3145728 numbers'",
}


@pytest.fixture(scope="module")
def requests() -> dict[str, bytes]:
    """Large ones, by what they are full of."""
    return hostile_requests(3 * MIB)


@pytest.mark.parametrize("name", NAMES)
async def test_too_many_fields_are_refused_without_counting_them_all(name: str, requests: dict[str, bytes]) -> None:
    expected = REFUSED.get(name, f"request: got 'more than {MAX_FIELDS} fields'")
    begun = time.thread_time()
    with pytest.raises(InvalidArgumentError, match=expected):
        await check_num_fields(requests[name], KIND, LoopTurns())
    # Decoding some of them takes longer than this alone, and what follows is more.
    assert time.thread_time() - begun < 0.3


class CountedTurns(LoopTurns):
    """Counts the pieces of work that begin."""

    num_begun = 0

    async def begin(self) -> None:
        """See `LoopTurns.begin`."""
        self.num_begun += 1


@pytest.mark.parametrize("name", NAMES)
async def test_many_fields_and_numbers_are_counted_in_many_pieces(name: str, requests: dict[str, bytes]) -> None:
    turns = CountedTurns()
    with pytest.raises(InvalidArgumentError):
        await check_num_fields(requests[name], KIND, turns)
    assert turns.num_begun > 10


async def test_a_large_request_in_which_all_can_be_honoured_passes() -> None:
    items = [generation_pb2.ChatMessage(role="user", content="a" * 900)] * 4096
    params = generation_pb2.SamplingParams(logit_bias=dict.fromkeys(range(256), 1.0), stop=["é" * 256] * 16)
    for request in (
        generation_pb2.GenerateRequest(text="é" * MIB, sampling_params=params, job_id="mine"),
        generation_pb2.GenerateRequest(messages=generation_pb2.ChatMessages(items=items), sampling_params=params),
        generation_pb2.GenerateRequest(input_ids=generation_pb2.TokenIds(ids=[150_000] * MAX_NUMBERS)),
    ):
        await check_num_fields(request.SerializeToString(), KIND, LoopTurns())


@pytest.mark.parametrize("begin", [b"", b"\x08", b"\x12"], ids=["key", "number", "length"])
async def test_a_number_without_an_end_is_not_followed(begin: bytes) -> None:
    class Counted(bytes):
        num_read = 0

        def __getitem__(self, place: Any) -> Any:
            self.num_read += 1
            return super().__getitem__(place)

    request = Counted(begin + b"\xff" * MIB)
    await check_num_fields(request, KIND, LoopTurns())
    assert request.num_read < 20


@pytest.mark.parametrize("cut", [1, 2, 5000, 9000])
async def test_a_request_that_ends_too_early_is_left_to_the_decoder(cut: int) -> None:
    request = generation_pb2.GenerateRequest(text="a" * 10_000, job_id="mine").SerializeToString()
    await check_num_fields(request[:-cut], KIND, LoopTurns())
    await check_num_fields(b"\xff" * 10_000, KIND, LoopTurns())
    await check_num_fields(b"\x00" * 10_000, KIND, LoopTurns())


NUM = 10 * WOKEN_IN_A_TURN


def work(seconds: float) -> None:
    """Holds the event loop."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        pass


async def loop_turns(counts: list[int]) -> None:
    """Appends a number for each turn of the loop."""
    while True:
        counts.append(0)
        await asyncio.sleep(0)


async def test_work_that_comes_together_is_done_in_many_turns() -> None:
    turns, counts = LoopTurns(), [0]

    async def piece() -> None:
        await turns.begin()
        counts[-1] += 1
        work(SLICE_S / 4)

    counting = asyncio.create_task(loop_turns(counts))
    async with asyncio.timeout(30):
        await asyncio.gather(*(piece() for _ in range(NUM)))
    counting.cancel()
    assert sum(counts) == NUM
    # The time is looked at before each piece, so that the last one may end late.
    assert max(counts) <= 5


async def test_a_piece_that_takes_too_long_leaves_none_waiting() -> None:
    turns = LoopTurns()

    async def piece() -> None:
        for _ in range(3):
            await turns.begin()
            work(2 * SLICE_S)

    async with asyncio.timeout(30):
        await asyncio.gather(*(piece() for _ in range(40)))


async def test_many_are_woken_in_many_turns_and_each_of_them_once() -> None:
    turns, counts = LoopTurns(), [0]
    futures = [asyncio.get_running_loop().create_future() for _ in range(NUM)]
    futures[-1].cancel()
    counting = asyncio.create_task(loop_turns(counts))

    async def one(future: asyncio.Future[None]) -> None:
        await future
        counts[-1] += 1

    tasks = [asyncio.create_task(one(future)) for future in futures[:-1]]
    await asyncio.sleep(0)
    turns.wake(futures)
    turns.wake(futures)
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks)
    counting.cancel()
    assert sum(counts) == NUM - 1
    assert max(counts) <= WOKEN_IN_A_TURN


async def test_turns_are_short_where_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop_turns_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    turns, counts = LoopTurns(), [0]

    async def piece() -> None:
        await turns.begin()
        counts[-1] += 1
        now[0] += SLICE_S / 16

    counting = asyncio.create_task(loop_turns(counts))
    async with asyncio.timeout(30):
        await asyncio.gather(*(piece() for _ in range(MANY_WAITING + NUM)))
    counting.cancel()
    assert sum(counts) == MANY_WAITING + NUM
    in_order = [count for count in counts if count]
    assert in_order[1:20] == [4] * 19
    assert max(in_order[20:]) == 16
