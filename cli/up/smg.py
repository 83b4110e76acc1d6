"""The SMG gateway, which serves the clients of OpenAI's interface: its command line, and when it is ready."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from slipstream.cli.up.process import ServiceCommand
from slipstream.common.rpc.address import TcpAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

HTTP = "http://"
SMG = "smg"

_RETRY_S = 0.1
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
"""It reads the tokenizer in the model's directory, and downloads nothing in its place."""


def smg_command(listen: TcpAddress, engines: Iterable[str], *, metrics_port: int, log_path: Path) -> ServiceCommand:
    """SMG at `listen`, in front of the gRPC addresses `engines`; its metrics are on the same host.

    An engine need not be there yet, and is asked for its health every second. One that does not answer gets no
    further requests until it does.
    """
    options: dict[str, object] = {
        "host": listen.host,
        "port": listen.port,
        "prometheus-host": listen.host,
        "prometheus-port": metrics_port,
        "policy": "round_robin",
        "log-level": "warn",
        "worker-startup-check-interval": 1,
        "health-check-interval-secs": 1,
        "health-check-timeout-secs": 2,
        "health-failure-threshold": 1,
        "health-success-threshold": 1,
        # It ends after its engines, and so has no request of its own to wait for.
        "shutdown-grace-period-secs": 1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    urls = (f"grpc://{engine}" for engine in engines)
    return ServiceCommand(
        name=SMG,
        argv=(sys.executable, "-P", "-m", "smg", "launch", *words, "--worker-urls", *urls),
        address=f"{HTTP}{listen}",
        log_path=log_path,
        environment=_ENVIRONMENT,
        restarts=True,
    )


async def wait_until_smg_serves(address: str) -> None:
    """Returns when the SMG at `address`, http://HOST:PORT, has an engine and its tokenizer. Tries for ever."""
    while True:
        try:
            # The tokenizer is loaded after the first engine has counted as ready.
            if await _get(address, "/readiness") and (await _get(address, "/v1/tokenizers") or {}).get("tokenizers"):
                return
        except (OSError, EOFError, ValueError):
            pass  # no server is there yet
        await asyncio.sleep(_RETRY_S)


async def smg_answers(address: str, timeout_s: float) -> bool:
    """Returns whether the SMG at `address`, http://HOST:PORT, answers in that time, whatever it says."""
    try:
        async with asyncio.timeout(timeout_s):
            await _get(address, "/readiness")
    except (OSError, EOFError, ValueError, TimeoutError):
        return False
    return True


async def _get(address: str, path: str) -> dict[str, Any] | None:
    """The JSON object at a path; None if the status is not 200. No proxy is asked."""
    target = parse_address(address.removeprefix(HTTP))
    assert isinstance(target, TcpAddress), "SMG listens on TCP"
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {target}\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if head.split(b" ", 2)[1:2] != [b"200"]:
        return None
    found: dict[str, Any] = json.loads(body)
    return found
