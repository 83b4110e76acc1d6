"""Three services in joined namespaces, as compose.yaml has them, tried without Docker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.bundled import target_dir

SCRIPT = Path(__file__).parent.parent.parent / "deploy" / "try-namespaces"


def _obstacle() -> str | None:
    """Why it cannot be tried here."""
    missing = [name for name in ("unshare", "nsenter", "setpriv", "ip") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may make namespaces and become another user"
    if any(Path(path).absolute().is_relative_to("/tmp") for path in (sys.executable, sys.base_prefix, target_dir())):
        return "the services have a /tmp of their own and would not see what is in this one"
    command = ("unshare", "--pid", "--ipc", "--net", "--mount", "--fork", "--mount-proc", "true")
    tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return None if tried.returncode == 0 else f"namespaces are not permitted: {tried.stderr.strip()}"


@pytest.mark.timeout(180)
def test_a_client_gets_its_text_from_services_that_can_do_nothing_else() -> None:
    obstacle = _obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    command = (str(SCRIPT), str(Path(sys.executable).parent), "def main():")
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert "SERVING" in lines
    assert "3 services, as user 10001, without capabilities; the root: Read-only file system" in lines
    assert json.loads(lines[-1])["text"]
