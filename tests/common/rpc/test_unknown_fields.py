"""Fields that we do not know, wherever they stand in a message."""

from __future__ import annotations

import pytest
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.protos import generation_pb2, worker_pb2

UNKNOWN = b"\xf8\x07\x01"
"""Field 127 with the value 1."""


def test_a_known_message_passes() -> None:
    reject_unknown_fields(generation_pb2.GenerateRequest(text="a", sampling_params={"seed": 1}))
    reject_unknown_fields(Struct(fields={"a": Value(list_value=ListValue(values=[Value(number_value=1)]))}))


def test_an_unknown_field_is_named() -> None:
    request = generation_pb2.GenerateRequest.FromString(UNKNOWN)
    with pytest.raises(InvalidArgumentError, match=r"^127: .*unknown field number 127.*GenerateRequest") as caught:
        reject_unknown_fields(request)
    assert caught.value.field == "127"


def test_an_unknown_field_of_a_message_within_is_named() -> None:
    request = generation_pb2.GenerateRequest(
        text="a", sampling_params=generation_pb2.SamplingParams.FromString(UNKNOWN)
    )
    with pytest.raises(InvalidArgumentError) as caught:
        reject_unknown_fields(request)
    assert caught.value.field == "sampling_params.127"


def test_an_unknown_field_of_a_repeated_message_is_named() -> None:
    update = worker_pb2.SlotUpdate(slot=1, sampling=worker_pb2.SlotSampling.FromString(UNKNOWN))
    command = worker_pb2.StepCommand(updates=[worker_pb2.SlotUpdate(slot=2), update])
    with pytest.raises(InvalidArgumentError) as caught:
        reject_unknown_fields(command)
    assert caught.value.field == "updates[1].sampling.127"


def test_an_unknown_field_in_a_map_is_named() -> None:
    message = Struct(fields={"a": Value.FromString(UNKNOWN)})
    with pytest.raises(InvalidArgumentError) as caught:
        reject_unknown_fields(message)
    assert caught.value.field == "fields[a].127"


def test_an_unknown_number_of_an_oneof_is_not_lost() -> None:
    # A later version's next kind of prompt.
    request = generation_pb2.GenerateRequest.FromString(b"\x7a\x01a")
    with pytest.raises(InvalidArgumentError, match="unknown field number 15"):
        reject_unknown_fields(request)


def test_a_message_full_of_unknown_fields_is_refused_without_listing_them() -> None:
    request = generation_pb2.GenerateRequest.FromString(b"\xf8\x07\x01" * 100_000)
    with pytest.raises(InvalidArgumentError, match="300000 bytes of unknown fields") as caught:
        reject_unknown_fields(request)
    assert caught.value.field == "request"
    params = generation_pb2.SamplingParams.FromString(b"\xf8\x07\x01" * 100_000)
    with pytest.raises(InvalidArgumentError) as caught:
        reject_unknown_fields(generation_pb2.GenerateRequest(text="a", sampling_params=params))
    assert caught.value.field == "sampling_params"
