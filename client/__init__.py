"""The Python client: `from slipstream.client import AsyncClient`, or `Client` where there is no event loop."""

from slipstream.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
