"""Requests that would cost a server much time, as bytes."""

from __future__ import annotations

from slipstream.common.messages import LENGTH_DELIMITED, VARINT, tag, varint
from slipstream.protos import generation_pb2

MIB = 2**20


def wire(number: int, payload: bytes) -> bytes:
    """A field of bytes, as it is on the wire."""
    return tag(number, LENGTH_DELIMITED) + varint(len(payload)) + payload


def hostile_requests(num_bytes: int) -> dict[str, bytes]:
    """Requests of this size that cost a server time in one way or another, by what they are full of."""
    request = {name: one.number for name, one in generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name.items()}
    params = {name: one.number for name, one in generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items()}
    unknown = tag(999, VARINT) + b"\1"
    message = wire(1, wire(1, b"user") + wire(2, b"a"))
    biases = (wire(params["logit_bias"], b"\x08" + varint(i) + b"\x15\0\0\x80?") for i in range(num_bytes // 13))
    return {
        "unknown fields": unknown * (num_bytes // len(unknown)),
        "unknown fields of messages": wire(
            request["messages"], (wire(1, wire(1, b"user") + wire(2, b"a") + unknown * 300)) * (num_bytes // 920)
        ),
        "input_ids": wire(request["input_ids"], wire(1, b"\1" * num_bytes)),
        "input_ids, one by one": wire(request["input_ids"], b"\x08\1" * (num_bytes // 2)),
        "messages": wire(request["messages"], message * (num_bytes // len(message))),
        "empty messages": wire(request["messages"], b"\x0a\0" * (num_bytes // 2)),
        "logit_bias": wire(request["sampling_params"], b"".join(biases)),
        "stop": wire(request["sampling_params"], wire(params["stop"], b"") * (num_bytes // 3)),
        "stop_token_ids": wire(request["sampling_params"], wire(params["stop_token_ids"], b"\1" * num_bytes)),
    }
