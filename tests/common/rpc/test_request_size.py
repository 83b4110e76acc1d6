"""Requests with too many fields are refused before they are decoded, and no other."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slipstream.benchmarks.probes import MIB, hostile_requests
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.rpc.loop_turns import LoopTurns
from slipstream.common.rpc.receive import MAX_FIELDS, MAX_NUMBERS, check_num_fields
from slipstream.protos import generation_pb2

KIND = generation_pb2.GenerateRequest.DESCRIPTOR
REQUESTS = hostile_requests(3 * MIB)
REFUSED = {
    "input_ids": r"input_ids\.ids: got '3145728 numbers'",
    "stop_token_ids": r"sampling_params\.stop_token_ids: got '3145728 numbers'",
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_too_many_fields_are_refused_without_counting_them_all(name: str) -> None:
    expected = REFUSED.get(name, f"request: got 'more than {MAX_FIELDS} fields'")
    begun = time.thread_time()
    with pytest.raises(InvalidArgumentError, match=expected):
        await check_num_fields(REQUESTS[name], KIND, LoopTurns())
    # Decoding some of them takes longer than this alone, and what follows is more.
    assert time.thread_time() - begun < 0.3


class CountedTurns(LoopTurns):
    """Counts the pieces of work that begin."""

    num_begun = 0

    async def begin(self) -> None:
        """See `LoopTurns.begin`."""
        self.num_begun += 1


@pytest.mark.parametrize("name", REQUESTS)
async def test_many_fields_and_numbers_are_counted_in_many_pieces(name: str) -> None:
    turns = CountedTurns()
    with pytest.raises(InvalidArgumentError):
        await check_num_fields(REQUESTS[name], KIND, turns)
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
