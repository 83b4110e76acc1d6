"""A call that a gateway forwards to another is its client's there, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from slipstream.gateway.keys import client_of, current_owner
from slipstream.gateway.peers import CLIENT_KEY, OWNER_KEY, FromPeers
from tests.harness.grpc_server import bytes_service, running_server

if TYPE_CHECKING:
    from pathlib import Path


async def _who(_request: bytes, context: Any) -> bytes:
    return f"{client_of(context)} {current_owner()}".encode()


async def test_a_private_address_believes_who_the_client_is(tmp_path: Path) -> None:
    service = bytes_service("Test", Who=grpc.unary_unary_rpc_method_handler(_who))
    metadata = ((CLIENT_KEY, "ipv4:1.2.3.4:5"), (OWNER_KEY, "ada"))
    address = f"unix:{tmp_path}/private/gateway-0.sock"
    async with (
        running_server(service, address=address, interceptors=[FromPeers()]) as private,
        running_server(service) as public,
        grpc.aio.insecure_channel(private.address) as to_private,
        grpc.aio.insecure_channel(public.address) as to_public,
    ):
        assert await to_private.unary_unary("/Test/Who")(b"", metadata=metadata) == b"ipv4:1.2.3.4:5 ada"
        assert (await to_private.unary_unary("/Test/Who")(b"")).startswith(b"unix:")
        assert b"1.2.3.4" not in await to_public.unary_unary("/Test/Who")(b"", metadata=metadata)
