"""`grpc.health.v1`: whether a service may be sent work.

The servicer that comes with gRPC forgets its other watchers when one of them leaves, and a watcher keeps
it from draining; hence our own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

SERVICE_NAME = "grpc.health.v1.Health"

_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers for the server as a whole (the empty name) and for each of its services, all alike."""

    def __init__(self) -> None:
        self._names = {""}
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, names: Iterable[str]) -> None:
        """Adds services to answer for."""
        self._names.update(names)

    def set_serving(self, is_serving: bool) -> None:
        """Says to who asks, and to who watches, whether there is service; after `close` there is none."""
        self._is_serving = is_serving and not self._is_closed
        self._announce()

    def close(self) -> None:
        """Ends the service for good, and every watch after it has heard of it."""
        self._is_serving = False
        self._is_closed = True
        self._announce()

    async def Check(self, request: Any, context: Any) -> Any:
        """The state now. Raises NotFoundError for a service that is not here."""
        if request.service not in self._names:
            raise NotFoundError(f"no service {request.service!r} here")
        return self._response(request.service)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The state now, and again whenever it changes."""
        last: int | None = None
        while True:
            changed = self._changed
            response = self._response(request.service)
            if response.status != last:
                last = response.status
                yield response
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _response(self, service: str) -> Any:
        if service not in self._names:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self._is_serving else _Status.NOT_SERVING)
