"""A client that sends a part of a message in each of many calls, and keeps to HTTP/2's windows as it must."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Self

from slipstream.common.rpc.address import UnixAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_DEFAULT_WINDOW = 2**16 - 1
_MAX_FRAME_BYTES = 2**14
_PIECE_BYTES = 2**18
"""Bytes of a call before the next one has its turn."""


class HalfMessages:
    """A connection whose calls each announce a message and leave out its end. A context manager."""

    def __init__(self, address: str, message_bytes: int) -> None:
        """Connects to a server without TLS. `message_bytes`: the length that each call announces."""
        parsed = parse_address(address)
        if isinstance(parsed, UnixAddress):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(parsed.path))
        else:
            self._socket = socket.create_connection((parsed.host, parsed.port))
        self._message = b"\0" + struct.pack(">I", message_bytes) + bytes(message_bytes - 1)
        self._received = b""
        self._windows = {0: _DEFAULT_WINDOW}
        self._initial_window = _DEFAULT_WINDOW
        self.num_sent: dict[int, int] = {}
        """Bytes of each call so far, by its stream."""
        self.ended: set[int] = set()
        """Streams that the server has ended."""
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, path: str, metadata: Sequence[tuple[str, str]] = ()) -> int:
        """Begins a call and returns its stream. `path`: as in /slipstream.v1.Generation/CreateJob."""
        stream = 2 * len(self.num_sent) + 1
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        headers += [("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        self.num_sent[stream] = 0
        self._windows.setdefault(stream, self._initial_window)
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, stream, b"".join(map(_literal, headers))))
        return stream

    def send(self, seconds: float) -> None:
        """Sends as much as the server takes, within this time, or until it hangs up or has it all."""
        ends_at = time.monotonic() + seconds
        while (left_s := ends_at - time.monotonic()) > 0 and any(map(self._lacks, self.num_sent)):
            num_bytes = sum(self._send(stream) for stream in self.num_sent if self._lacks(stream))
            if not self._receive(0.0 if num_bytes else min(left_s, 0.05)):
                return

    def _lacks(self, stream: int) -> bool:
        return stream not in self.ended and self.num_sent[stream] < len(self._message)

    def _send(self, stream: int) -> int:
        """Sends a piece of a call's message; returns its bytes."""
        begin = self.num_sent[stream]
        end = min(len(self._message), begin + max(0, min(_PIECE_BYTES, self._windows[0], self._windows[stream])))
        for place in range(begin, end, _MAX_FRAME_BYTES):
            self._socket.sendall(_frame(_DATA, 0, stream, self._message[place : min(end, place + _MAX_FRAME_BYTES)]))
        self.num_sent[stream] = end
        self._windows[0] -= end - begin
        self._windows[stream] -= end - begin
        return end - begin

    def _receive(self, timeout_s: float) -> bool:
        """Takes what the server has sent. False if it has hung up."""
        while select.select([self._socket], [], [], timeout_s)[0]:
            data = self._socket.recv(_PIECE_BYTES)
            if not data:
                return False
            self._received += data
            timeout_s = 0.0
        while len(self._received) >= 9:
            length, kind, flags, stream = struct.unpack(">IBBI", b"\0" + self._received[:9])
            if len(self._received) < 9 + length:
                break
            payload, self._received = self._received[9 : 9 + length], self._received[9 + length :]
            self._take(kind, flags, stream, payload)
        return True

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == _INITIAL_WINDOW_SIZE:
                    for number in self.num_sent:
                        self._windows[number] += value - self._initial_window
                    self._initial_window = value
            self._socket.sendall(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, self._initial_window) + int.from_bytes(payload, "big")
        elif kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM):
            self.ended.add(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(header: tuple[str, str]) -> bytes:
    """A header as HPACK has it when neither side keeps it."""
    name, value = header
    assert len(name) < 127, "a longer one has its length in several bytes"
    assert len(value) < 127, "a longer one has its length in several bytes"
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
