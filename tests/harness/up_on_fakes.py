"""`slipstream up` on fake services: up_on_fakes.py STATE_DIR [--mps] [--terminal PATH] [--draft PATH] ...

A scheduler and a gateway serve at STATE_DIR/scheduler.sock and gateway.sock. The scheduler notes each SIGTERM in
STATE_DIR/journal; the gateway is started again when it dies. With --draft there is a draft, too, at draft.sock, which
cannot be served while PATH exists.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from slipstream.cli import up
from slipstream.cli.models import ModelChoice
from slipstream.cli.process import ServiceCommand
from slipstream.cli.up_config import UpConfig
from slipstream.common.errors import SlipstreamError

_FAKE_SERVICE = Path(__file__).with_name("fake_service.py")


def _fake(folder: Path, name: str, *options: str) -> ServiceCommand:
    address = f"unix:{folder}/{name}.sock"
    argv = (sys.executable, str(_FAKE_SERVICE), "--listen", address, *options)
    return ServiceCommand(name=name, argv=argv, address=address, log_path=folder / f"{name}.log")


def main() -> None:
    """Ends as the command does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--mps", action="store_true", help="starts the MPS daemon")
    parser.add_argument("--terminal", help="becomes the controlling terminal")
    parser.add_argument("--draft", help="starts a draft")
    parser.add_argument("--max-restarts", type=int, default=5)
    options = parser.parse_args()
    if options.terminal:
        terminal = os.open(options.terminal, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(terminal, descriptor)
        os.close(terminal)
    folder = options.state_dir
    scheduler = _fake(folder, "scheduler", "--journal", str(folder / "journal"))
    drafts = [] if options.draft is None else [_fake(folder, "draft", "--status", "2", "--die-when", options.draft)]
    workers = [replace(draft, restarts=True, is_optional=True) for draft in drafts]
    services = [workers, [scheduler], [replace(_fake(folder, "gateway"), restarts=True)]]
    models = ModelChoice(target=Path("/usr"), draft=None, algorithm="none")
    gpu = {"device": "cuda", "mps": "on"} if options.mps else {"device": "cpu"}
    more = {"max_restarts": options.max_restarts, **gpu}

    def has_to_wait() -> bool:
        return options.draft is not None and Path(options.draft).exists()

    async def fetch_status(_server: str) -> SimpleNamespace:
        state = SimpleNamespace(draft_state="waiting" if has_to_wait() else "")
        return SimpleNamespace(print=lambda: None, state=state)

    async def check(_config: UpConfig) -> None:
        pass

    config = UpConfig(models=models, state_dir=folder, listen="127.0.0.1:0", **more)
    with (
        patch.object(up, "_check", check),
        patch.object(up, "_commands", lambda _config, _listen: services),
        patch.object(up, "fetch_status", fetch_status),
    ):
        try:
            sys.exit(asyncio.run(up.run_up(config, is_verbose=False)))
        except SlipstreamError as error:
            sys.exit(str(error))


main()
