"""The Python client: `from slipstream.client import AsyncClient`."""

from slipstream.client.client import AsyncClient

__all__ = ["AsyncClient"]
