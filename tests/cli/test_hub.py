"""Models by their names on the hub, from a hub on this host: what is fetched, what is kept, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slipstream.cli.hub import find_model
from slipstream.services.factory import model_name
from tests.harness.checkpoints import write_checkpoint

NAME = "some-org/Tiny-Model"
COMMIT, BRANCH_COMMIT = "a" * 40, "b" * 40
REVISIONS = {"main": COMMIT, "other": BRANCH_COMMIT, COMMIT: COMMIT, BRANCH_COMMIT: BRANCH_COMMIT}
UNWANTED = ("modeling_tiny.py", "pytorch_model.bin", "original/config.json", "consolidated.safetensors", "README.md")
WANTED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
FIND = """
import sys
from pathlib import Path
from slipstream.cli.hub import find_model
from slipstream.common.errors import ConfigError
try:
    print(find_model("target", Path(sys.argv[1]), may_download=sys.argv[2] == "download"))
except ConfigError as error:
    print(error)
"""


@dataclass
class Hub:
    """The part of the hub's interface by which a model is fetched."""

    files: dict[str, bytes]
    asked: list[str] = field(default_factory=list)
    """Paths of the requests for files' contents."""
    endpoint: str = ""

    def answer(self, path: str, *, has_body: bool) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and content for a request."""
        path, _, _ = path.partition("?")
        for revision, commit in REVISIONS.items():
            if path in (f"/api/models/{NAME}/revision/{revision}", f"/api/models/{NAME}"):
                siblings = [{"rfilename": name} for name in self.files]
                return 200, {}, json.dumps({"id": NAME, "sha": commit, "siblings": siblings}).encode()
            if path == f"/api/models/{NAME}/tree/{revision}":
                return 200, {}, json.dumps([self._listed(name) for name in self.files]).encode()
            name = path.removeprefix(f"/{NAME}/resolve/{revision}/")
            if name in self.files:
                if has_body:
                    self.asked.append(name)
                digest = hashlib.sha256(self.files[name]).hexdigest()
                return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": commit}, self.files[name]
        return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "there is no such model"}, b"{}"

    def _listed(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": "c" * 40}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with one model, beside whose files lie some that are not wanted."""
    path = write_checkpoint(tmp_path / "published")
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    hub = Hub(files | dict.fromkeys(UNWANTED, b"{}"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def _answer(self, *, has_body: bool) -> None:
            status, headers, body = hub.answer(self.path, has_body=has_body)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()
        thread.join()


def find(hub: Hub, home: Path, given: str, *, may_download: bool = True, **environment: str) -> str:
    """The directory, or the error, in a process of its own: the hub's settings are read when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    run = subprocess.run(
        [sys.executable, "-c", FIND, given, "download" if may_download else "cache"],
        env=inherited | {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_model_is_fetched_once_and_without_code(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    offline = find(hub, home, NAME, HF_HUB_OFFLINE="1")
    assert "target: " in offline
    assert "OfflineMode" in offline or "outgoing traffic" in offline
    assert "the cache has no whole copy of it" in find(hub, home, NAME, may_download=False)
    assert not hub.asked
    found = home / "hub" / "models--some-org--Tiny-Model" / "snapshots" / COMMIT
    assert find(hub, home, NAME) == str(found)
    assert sorted(file.name for file in found.iterdir()) == sorted(hub.asked) == WANTED
    hub.asked.clear()
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert find(hub, home, NAME, **environment) == str(found)
    assert find(hub, home, NAME, may_download=False) == str(found)
    assert not hub.asked, "it is in the cache"
    (found / "model.safetensors").unlink()
    assert find(hub, home, NAME) == str(found)
    assert (found / "model.safetensors").is_file(), "what an interrupted download left out is fetched"
    assert model_name(found) == NAME


def test_a_revision_is_one_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    for revision, commit in (("other", BRANCH_COMMIT), (COMMIT, COMMIT)):
        assert find(hub, tmp_path, f"{NAME}@{revision}").endswith(f"/snapshots/{commit}")


@pytest.mark.parametrize(
    ("given", "environment", "reason"),
    [
        ("some-org/no-model", {}, "RepositoryNotFoundError"),
        (NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "LocalEntryNotFoundError"),
        ("some..org/a--b", {}, "HFValidationError"),
    ],
)
def test_what_the_hub_does_not_have_is_said_in_one_line(
    hub: Hub, tmp_path: Path, given: str, environment: dict[str, str], reason: str
) -> None:
    error = find(hub, tmp_path, given, **environment)
    assert error.startswith(f"target: got {given!r}, ")
    assert "ORG/NAME[@REVISION] of the hub; " in error
    assert reason in error
    assert "\n" not in error


@pytest.mark.parametrize("given", ["org/name", "/abs/olute", "alone", "a/b/c", "org/name@", "../org/name"])
def test_a_directory_goes_first_and_other_words_are_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_model("target", Path(given), may_download=False) == Path(given)
