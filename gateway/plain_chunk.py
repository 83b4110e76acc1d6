"""Chunks of plain text as the bytes of their messages, for the one message that each stream gets in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.messages import LENGTH_DELIMITED, VARINT, tag, varint
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIELDS = generation_pb2.GenerateResponse.DESCRIPTOR.fields_by_name
_TOKEN_OFFSET, _PUBLISHED_NS = (tag(_FIELDS[name].number, VARINT) for name in ("token_offset", "published_ns"))
_TOKEN_IDS, _TEXT, _IS_DRAFT, _TEXT_LENGTHS = (
    tag(_FIELDS[name].number, LENGTH_DELIMITED) for name in ("token_ids", "text", "is_draft", "text_lengths")
)


class PlainChunkEncoder:
    """Encodes chunks of one sample that have no logprobs and are not its last, in half the time of `OutputChunk.to_pb`.

    The bytes are those that protobuf makes of the same `GenerateResponse`.
    """

    def __init__(self, job_id: str, sample_index: int, attempt: int) -> None:
        """The arguments are the same in all chunks of the sample."""
        self._begin = generation_pb2.GenerateResponse(job_id=job_id).SerializeToString()
        self._end = generation_pb2.GenerateResponse(sample_index=sample_index, attempt=attempt).SerializeToString()

    def encode(
        self,
        token_offset: int,
        token_ids: Sequence[int],
        text: str,
        is_draft: bytes | bytearray,
        text_lengths: Sequence[int],
        published_ns: int,
    ) -> bytes:
        """The message of some tokens; `is_draft` has a byte for each, 0 or 1. Its fields as in `OutputChunk`."""
        num_tokens = varint(len(token_ids))
        ids, lengths = b"".join(map(varint, token_ids)), b"".join(map(varint, text_lengths))
        parts: list[bytes | bytearray] = [self._begin, _TOKEN_IDS, varint(len(ids)), ids]
        if token_offset:
            parts[1:1] = _TOKEN_OFFSET, varint(token_offset)
        if text:
            encoded = text.encode()
            parts += _TEXT, varint(len(encoded)), encoded
        parts += _IS_DRAFT, num_tokens, is_draft, _TEXT_LENGTHS, varint(len(lengths)), lengths, self._end
        if published_ns:
            parts += _PUBLISHED_NS, varint(published_ns)
        return b"".join(parts)
