"""Four services in joined namespaces, as compose.yaml has them, tried without Docker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "deploy" / "try-namespaces"
NAMESPACES = ("--pid", "--ipc", "--net", "--mount", "--fork", "--mount-proc")
IN_USER_NAMESPACE = "--user-namespace"


def _obstacle(option: str) -> str | None:
    """Returns why namespaces cannot be made here, or None."""
    missing = [name for name in ("unshare", "setpriv", "findmnt", "ip") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if option != IN_USER_NAMESPACE and os.geteuid() != 0:
        return "only root makes namespaces without a user namespace around them"
    user = ("--user", "--map-user=10001", "--map-group=10001", "--keep-caps") if option == IN_USER_NAMESPACE else ()
    command = ("unshare", *user, *NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/tmp")
    tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return None if tried.returncode == 0 else f"namespaces are not permitted: {tried.stderr.strip()}"


@pytest.mark.timeout(180)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("option", ["", IN_USER_NAMESPACE], ids=["root", "user namespace"])
def test_a_client_gets_its_text_from_services_that_can_do_nothing_else(option: str) -> None:
    obstacle = _obstacle(option)
    if obstacle is not None:
        pytest.skip(obstacle)
    command = (str(SCRIPT), *filter(None, [option]), str(Path(sys.executable).parent), "def main():")
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert "SERVING" in lines
    assert "4 services, as user 10001, without capabilities; the root: Read-only file system" in lines
    assert json.loads(lines[-1])["text"]
