"""`slipstream up` whose clients need TLS and a key, with the commands that connect to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.client.connection import API_KEY_VARIABLE
from tests.harness.certificates import Certificates
from tests.harness.checkpoints import write_checkpoint
from tests.harness.running import running_up, slipstream, status

pytestmark = pytest.mark.timeout(180)

KEY = "ann-0123456789abcdef"


@pytest.mark.slow
def test_commands_reach_a_server_with_mutual_tls_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, keys, target = Certificates(tmp_path), tmp_path / "keys", write_checkpoint(tmp_path / "target", seed=9)
    keys.write_text(f"ann:{KEY}\n")
    secured = ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-client-ca", files.ca, "--api-keys", keys)
    model = ("--target", target, "--algorithm", "none", "--kv-memory-mib", "8", "--slots", "2")
    with running_up(tmp_path / "state", *(str(word) for word in (*model, *secured))):
        # The commands of this user need neither.
        found = status(tmp_path / "state")
        assert found["healthy"]
        assert found["server"] == f"unix:{tmp_path}/state/sockets/gateway.sock"
        server = next(service["address"] for service in found["services"] if service["name"] == "gateway")
        certificate = ("--tls-ca", files.ca, "--tls-cert", files.client_cert, "--tls-key", files.client_key)
        access = ("--server", server, *(str(word) for word in certificate))
        refused = slipstream("generate", *access, "--max-new-tokens", "4", "--chat", "x")
        assert (refused.returncode, refused.stderr) == (
            1,
            "slipstream: error: no valid API key: send `authorization: Bearer TOKEN` "
            "(--api-key TOKEN, or the variable SLIPSTREAM_API_KEY)\n",
        )
        monkeypatch.setenv(API_KEY_VARIABLE, KEY)
        assert slipstream("generate", *access, "--max-new-tokens", "4", "the man").returncode == 0
        assert slipstream("status", *access).returncode == 0
        without_certificate = slipstream("status", "--server", server, "--tls-ca", str(files.ca))
        assert without_certificate.returncode == 1
        assert slipstream("health", server, *access[2:]).stdout == "SERVING\n"
    for log in (tmp_path / "state").glob("*.log"):
        assert KEY not in log.read_text()
