"""What an SMG says of the servers behind it."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from urllib.error import URLError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener


def num_healthy(openai_port: int, ca: Path | None = None) -> int:
    """Servers that SMG sends requests to; 0 while it is not there. `ca`: it has TLS, by this authority."""
    http = build_opener(ProxyHandler({}), HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
    scheme = "http" if ca is None else "https"
    try:
        with http.open(f"{scheme}://127.0.0.1:{openai_port}/readiness", timeout=5) as answer:
            return int(json.load(answer)["healthy_workers"])
    except URLError:
        return 0


async def until_healthy(num: int, openai_port: int, ca: Path | None = None) -> None:
    """Returns when SMG has this number of servers; the test's timeout bounds it."""
    while await asyncio.to_thread(num_healthy, openai_port, ca) != num:
        pass
