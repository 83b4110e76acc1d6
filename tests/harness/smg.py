"""What an SMG says of the servers behind it."""

from __future__ import annotations

import asyncio
import json
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

_http = build_opener(ProxyHandler({}))


def num_healthy(openai_port: int) -> int:
    """Servers that SMG sends requests to; 0 while it is not there."""
    try:
        with _http.open(f"http://127.0.0.1:{openai_port}/readiness", timeout=5) as answer:
            return int(json.load(answer)["healthy_workers"])
    except URLError:
        return 0


async def until_healthy(num: int, openai_port: int) -> None:
    """Returns when SMG has so many servers; the test's timeout bounds it."""
    while await asyncio.to_thread(num_healthy, openai_port) != num:
        pass
