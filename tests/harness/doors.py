"""A door of OpenAI's interface for tests: on a socket of its own, in this process, before a real gateway."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from safetensors.torch import load_file

from slipstream.bundled import target_dir
from slipstream.client import AsyncClient
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.metrics import RpcMetrics, make_registry
from slipstream.door.app import make_app
from slipstream.door.call import Door
from slipstream.door.config import DoorConfig
from slipstream.door.server import DoorServer
from tests.harness.checkpoints import write_json, write_weights
from tests.harness.waiting import until


@dataclass(frozen=True, slots=True)
class RunningDoor:
    """A door that serves, and clients of it."""

    url: str
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    server: DoorServer

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        """Sends a request."""
        return await self.http.post(path, json=fields)


@asynccontextmanager
async def running_door(gateway: str, *, api_key: str = "none", **settings: Any) -> AsyncIterator[RunningDoor]:
    """A door before a gateway."""
    config = DoorConfig(gateway=gateway, **settings)
    registry = make_registry()
    scheme = "https" if config.has_tls else "http"
    with Listener.claim("127.0.0.1:0") as listener:
        async with AsyncClient(gateway, together_from=0, connect_timeout_s=config.reconnect_s) as client:
            app = make_app(Door(client, config, RpcMetrics(registry)), registry)
            server = DoorServer(app, config, listener)
            serving = asyncio.create_task(server.serve())
            await until(lambda: server.started)
            url = f"{scheme}://{listener.address}"
            headers = {"authorization": f"Bearer {api_key}"}
            try:
                async with (
                    httpx.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False) as http,
                    httpx.AsyncClient(trust_env=False, timeout=30) as inner,
                    openai.AsyncOpenAI(
                        base_url=f"{url}/v1", api_key=api_key, max_retries=0, http_client=inner
                    ) as theirs,
                ):
                    yield RunningDoor(url, http, theirs, server)
            finally:
                server.should_exit = True
                await serving


def write_chat_model(path: Path, template: str) -> Path:
    """The bundled target with a chat template, in float32: there a batch changes no token."""
    shutil.copytree(target_dir(), path)
    for name, changes in (
        ("tokenizer_config.json", {"chat_template": template}),
        ("config.json", {"dtype": "float32"}),
    ):
        write_json(path / name, json.loads((path / name).read_text()) | changes)
    weights = load_file(path / "model.safetensors")
    write_weights(path, {name: weight.float() for name, weight in weights.items()})
    return path
