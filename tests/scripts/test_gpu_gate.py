"""Tests of the gate for GPU runs, against a fake API, and of the workflow around it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
HEAD, OTHER = "a" * 40, "b" * 40


class FakeGh:
    """A `gh` on the path that answers with a file, filtered by the real jq, and notes how it was called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "gh"
        program.write_text(
            f"""#!/bin/sh
printf '%s\\n' "$@" >> {folder}/calls
[ -e {folder}/answer ] || {{ echo 'HTTP 502' >&2; exit 1; }}
[ "$1 $3" = "api --jq" ] || exit 3
exec jq --raw-output "$4" {folder}/answer
"""
        )
        program.chmod(0o700)

    def say(self, *labels: str, state: str = "open", head: str = HEAD) -> None:
        """Sets the state of the pull request from now on."""
        answer = {"state": state, "head": {"sha": head}, "labels": [{"name": label} for label in labels]}
        (self._folder / "answer").write_text(json.dumps(answer))

    def gate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the script."""
        arguments = arguments or ("owner/name", "17", HEAD)
        environment = {"PATH": f"{self._folder}:{os.environ['PATH']}"}
        command = (str(ROOT / "scripts" / "gpu-gate"), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, env=environment)

    @property
    def calls(self) -> list[str]:
        """The words of all calls."""
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def gh(tmp_path: Path) -> FakeGh:
    """In place of GitHub."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    return FakeGh(tmp_path)


def test_a_label_that_was_added_later_is_seen(gh: FakeGh) -> None:
    gh.say("bug")
    assert gh.gate().stdout == "run=false\n"
    gh.say("bug", "run-ci-extra")
    assert gh.gate().stdout == "run=true\n"
    gh.say("bug")
    assert gh.gate().stdout == "run=false\n"
    assert gh.calls.count("repos/owner/name/pulls/17") == 3


@pytest.mark.parametrize("label", ["run-ci", "run-ci-extra-2", "Run-CI-extra ", "not-run-ci-extra", "run-ci extra"])
def test_other_labels_are_not_it(gh: FakeGh, label: str) -> None:
    gh.say(label)
    found = gh.gate()
    assert (found.returncode, found.stdout) == (0, "run=false\n")
    assert "no label run-ci-extra" in found.stderr


def test_only_what_an_open_pull_request_is_at(gh: FakeGh) -> None:
    gh.say("run-ci-extra", state="closed")
    assert gh.gate().stdout == "run=false\n"
    gh.say("run-ci-extra", head=OTHER)
    assert gh.gate().stdout == "run=false\n"


def test_what_cannot_be_known_lets_nothing_through(gh: FakeGh) -> None:
    found = gh.gate()
    assert found.returncode != 0
    assert found.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [("owner", "17", HEAD), ("owner/name", "1;7", HEAD), ("owner/name", "17", "main"), ("a/b/../c", "17", HEAD)],
)
def test_arguments_are_what_they_should_be(gh: FakeGh, arguments: tuple[str, ...]) -> None:
    gh.say("run-ci-extra")
    found = gh.gate(*arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert gh.calls == []


def workflow(name: str) -> dict[Any, Any]:
    """As YAML has it: `on` is True there."""
    found: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    return found


def test_workflows_follow_their_schema() -> None:
    files = [str(path) for path in sorted(WORKFLOWS.glob("*.yml"))]
    assert len(files) == 2
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *files)
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", ["checks.yml", "gpu.yml"])
def test_workflows_have_the_least_rights(name: str) -> None:
    found = workflow(name)
    text = (WORKFLOWS / name).read_text(encoding="utf-8")
    assert "secrets." not in text
    assert "pull_request_target" not in found[True], "it would give a fork's code our rights"
    assert found["permissions"] in ({}, {"contents": "read"})
    for job in found["jobs"].values():
        assert set(job.get("permissions", {}).values()) <= {"read"}
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            # What an author can choose, a branch's name or a title, must not become a part of a script.
            assert "${{" not in step.get("run", "")
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_labels_start_nothing_and_are_asked_for_when_it_runs() -> None:
    found = workflow("gpu.yml")
    assert set(found[True]) == {"pull_request"}
    assert not {"labeled", "unlabeled"} & set(found[True]["pull_request"]["types"])
    assert "event.pull_request.labels" not in (WORKFLOWS / "gpu.yml").read_text(encoding="utf-8")
    gate, test = found["jobs"]["gate"], found["jobs"]["test"]
    assert gate["if"] == "github.event.pull_request.head.repo.full_name == github.repository"
    assert test["needs"] == "gate"
    assert test["if"] == "needs.gate.outputs.run == 'true'"
    assert any("scripts/gpu-gate" in step.get("run", "") for step in gate["steps"])
