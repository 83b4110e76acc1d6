"""Counts the fields of a request before it is decoded: a few MiB of small ones would hold the event loop for long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.descriptor import FieldDescriptor

from slipstream.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor

    from slipstream.common.rpc.loop_turns import LoopTurns

MAX_FIELDS = 2**14
"""Fields of a request and of the messages in it, known or not; decoded in a few milliseconds."""
MAX_NUMBERS = 2**20
"""Numbers in one of its packed lists."""
MIN_COUNTED_BYTES = 2**13
"""A shorter request is decoded in no time, whatever is in it."""
_FIELDS_IN_A_PIECE = 2**9
_BYTES_IN_A_PIECE = 2**18
"""Both are counted in a fraction of a millisecond."""
_CONTINUED = bytes(range(128, 256))
"""Bytes of a number other than its last."""
_MOST_VARINT_BYTES = 10
"""A number of 64 bits has no more."""
_VARINT, _FIXED_64, _DELIMITED, _FIXED_32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED_64: 8, _FIXED_32: 4}
_NOT_PACKED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


async def check_num_fields(request: bytes, kind: Descriptor, turns: LoopTurns) -> None:
    """Raises InvalidArgumentError for a request of this kind with too many fields, or too many numbers in a list.

    Counts, and returns, within `turns`. A request that cannot be decoded may pass. Not for one that is shorter than
    `MIN_COUNTED_BYTES`.
    """
    await turns.begin()
    for num_fields in _pieces(request, kind):
        if num_fields > MAX_FIELDS:
            raise InvalidArgumentError("request", f"more than {MAX_FIELDS} fields", f"at most {MAX_FIELDS}")
        await turns.begin()


def _pieces(request: bytes, kind: Descriptor) -> Iterator[int]:
    """Yields the number of fields so far, now and then and at the end."""
    num_fields = 0
    nested: list[tuple[int, int, Descriptor, str]] = [(0, len(request), kind, "")]
    try:
        while nested:
            place, end, message, path = nested.pop()
            fields = message.fields_by_number
            while place < end:
                num_fields += 1
                if num_fields % _FIELDS_IN_A_PIECE == 0:
                    yield num_fields
                key, place = _varint(request, place)
                wire_type = key & 7
                if wire_type == _VARINT:
                    _, place = _varint(request, place)
                elif wire_type == _DELIMITED:
                    length, place = _varint(request, place)
                    field = fields.get(key >> 3)
                    if field is not None and field.message_type is not None:
                        nested.append((place, place + length, field.message_type, f"{path}{field.name}."))
                    elif field is not None and field.is_repeated and field.type not in _NOT_PACKED:
                        for _ in _check_numbers(request, place, place + length, path + field.name):
                            yield num_fields
                    place += length
                else:
                    # The others begin or end a group, and have no content of their own.
                    place += _FIXED_BYTES.get(wire_type, 0)
    except IndexError:
        return
    yield num_fields


def _varint(request: bytes, place: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises IndexError if there is none."""
    value = request[place]
    if value < 128:
        return value, place + 1
    value &= 127
    for length in range(1, _MOST_VARINT_BYTES):
        byte = request[place + length]
        value |= (byte & 127) << 7 * length
        if byte < 128:
            return value, place + length + 1
    raise IndexError("the number has no end")


def _check_numbers(request: bytes, begin: int, end: int, name: str) -> Iterator[None]:
    """Raises InvalidArgumentError if the packed list in [begin, end) is too long; yields now and then."""
    if end - begin <= MAX_NUMBERS:
        return
    num_numbers = 0
    for place in range(begin, min(end, len(request)), _BYTES_IN_A_PIECE):
        piece = request[place : min(end, place + _BYTES_IN_A_PIECE)]
        num_numbers += len(piece.translate(None, _CONTINUED))
        yield
    if num_numbers > MAX_NUMBERS:
        raise InvalidArgumentError(name, f"{num_numbers} numbers", f"at most {MAX_NUMBERS}")
