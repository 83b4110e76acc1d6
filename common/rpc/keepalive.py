"""How long a connection may take to be made, and the settings that let it notice that its other end has stopped."""

from __future__ import annotations

from dataclasses import dataclass

ChannelOption = tuple[str, str | int]

CONNECT_TIMEOUT_S = 5.0
"""Time for which a client tries a server that has never answered; also the limit of one attempt to connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Pings on an idle connection, which find a peer that hangs; one that was killed is noticed at once."""

    interval_ms: int = 10_000
    """Silence after which a ping is sent."""
    timeout_ms: int = 5_000
    """Time for the answer; then the connection is given up, and its calls end with UNAVAILABLE."""

    def options(self) -> list[ChannelOption]:
        """Returns the arguments of a gRPC channel or server."""
        return [
            ("grpc.keepalive_time_ms", self.interval_ms),
            ("grpc.keepalive_timeout_ms", self.timeout_ms),
            # Without it the two above do not end a connection whose peer is stopped but not dead.
            ("grpc.http2.ping_timeout_ms", self.timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


SAME_HOST = Keepalive(interval_ms=2_000, timeout_ms=1_000)
"""Between our own processes."""
