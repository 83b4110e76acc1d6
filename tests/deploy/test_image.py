"""The Dockerfile and what it is built from, against the tree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.harness.compose_files import DEPLOY, load

ROOT = DEPLOY.parent
DOCKERFILE, GATEWAY = (
    re.sub(r"\\\n\s*", "", (DEPLOY / name).read_text(encoding="utf-8")) for name in ("Dockerfile", "gateway.Dockerfile")
)


def arguments() -> dict[str, str]:
    """The build arguments with their defaults."""
    return {name: value.strip('"') for name, value in re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE)}


def is_let_through(path: str) -> bool:
    """True if `.dockerignore` lets a file through: the last pattern that matches it or a folder above wins."""
    path_parts = PurePosixPath(path)
    places = [str(place) for place in (path_parts, *path_parts.parents) if str(place) != "."]
    is_let = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        wanted = pattern.removeprefix("!")
        if any(_matches(place, wanted) for place in places):
            is_let = pattern.startswith("!")
    return is_let


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return any(_matches("/".join(path.split("/")[i:]), pattern[3:]) for i in range(path.count("/") + 1))
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch, parts, wanted))


def pyproject() -> dict[str, Any]:
    """Returns the parsed `pyproject.toml`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_builder_gets_all_that_the_package_is_made_of() -> None:
    project = pyproject()
    folders = project["tool"]["setuptools"]["package-dir"]
    needed = ["pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], "constraints.txt"]
    for package in project["tool"]["setuptools"]["packages"]:
        first = ".".join(package.split(".")[:2])
        folder = ROOT.joinpath(folders[first], *package.split(".")[2:])
        patterns = {"*.py", *project["tool"]["setuptools"]["package-data"]["*"]}
        patterns |= set(project["tool"]["setuptools"]["package-data"].get(package, ()))
        files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
        assert files, package
        needed += [str(file.relative_to(ROOT)) for file in files]
    assert [path for path in needed if not is_let_through(path)] == []


@pytest.mark.parametrize("path", [".git/config", ".env", "deploy/.env", "tests/conftest.py", ".venv/bin/python"])
def test_the_builder_gets_nothing_else(path: str) -> None:
    assert not is_let_through(path)
    assert is_let_through("cli/main.py")
    assert not is_let_through("cli/__pycache__/main.pyc")


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [(DOCKERFILE, {"build", "final", "final-gpu", "final-cpu"}), (GATEWAY, {"build", "final"})],
    ids=["device", "gateway"],
)
def test_copied_files_exist(dockerfile: str, expected: set[str]) -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    assert stages == expected
    copies = re.findall(r"^COPY (--from=(\S+) )?(\S+) (\S+)$", dockerfile, re.MULTILINE)
    assert len(copies) == dockerfile.count("\nCOPY ")
    for _, stage, source, _ in copies:
        assert stage in stages if stage else (ROOT / source).exists()
    for file in re.findall(r"/src/([\w.]+)", dockerfile):
        assert (ROOT / file).exists()
        assert is_let_through(file)


def test_every_variant_that_is_asked_for_can_be_built() -> None:
    for files, variant in (
        (("compose.yaml", "compose.gpu.yaml"), "gpu"),
        (("compose.yaml", "compose.cpu.yaml"), "cpu"),
    ):
        project = load(*files)
        build = project["services"]["anchor"]["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT.resolve()
        assert (ROOT / build["dockerfile"]).is_file()
        assert set(build["args"]) <= set(arguments())
        assert build["args"] == {"VARIANT": variant}
        assert f" AS final-{variant}\n" in DOCKERFILE
        images = {service["image"] for name, service in project["services"].items() if "profiles" not in service}
        assert images == {f"slipstream:{variant}", "slipstream:gateway"}
        gateway = project["services"]["gateway"]["build"]
        assert (ROOT / gateway["dockerfile"]).is_file()


def test_bases_are_pinned_by_tag() -> None:
    project = load("compose.yaml")
    images = [project["services"][name]["image"] for name in ("prometheus", "grafana")]
    for image in (arguments()["PYTHON"], *images):
        _, _, tag = image.partition(":")
        assert re.match(r"v?\d+\.\d+", tag), image


def test_installs_what_pyproject_names() -> None:
    project = pyproject()["project"]
    assert "cuda" in project["optional-dependencies"]
    assert "constraints" in project["optional-dependencies"]
    assert "/src[cuda,constraints]" in DOCKERFILE
    assert '"/src[constraints]"' in DOCKERFILE
    assert "*extras['constraints']" in GATEWAY
    low, high = re.findall(r"[\d.]+", arguments()["TORCH"])
    least = next(need for need in project["dependencies"] if need.startswith("torch>=")).removeprefix("torch>=")
    assert _version(least) <= _version(low)
    tested = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert tested is not None
    assert _version(low) <= (int(tested[1]), int(tested[2])) < _version(high)


def without_what_is_not_installed(*modules: str) -> subprocess.CompletedProcess[str]:
    """Imports modules where the packages that the gateway's image lacks are not there."""
    missing = re.findall(r'^ARG NOT_INSTALLED="(.*)"$', GATEWAY, re.MULTILINE)[0].split("|")
    block = "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(',')))"
    load = "import importlib; [importlib.import_module(name) for name in sys.argv[2:]]"
    command = (sys.executable, "-c", f"{block}; {load}", ",".join(missing), *modules)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_gateway_s_image_has_all_that_the_gateway_imports() -> None:
    wanted = ("gateway.server", "gateway.main", "cli.main", "cli.status")
    found = without_what_is_not_installed(*(f"slipstream.{name}" for name in wanted))
    assert found.returncode == 0, found.stderr
    assert "numpy" in without_what_is_not_installed("slipstream.services.models.sampler").stderr
    needs = [re.match(r"[\w-]+", need)[0] for need in pyproject()["project"]["dependencies"]]  # type: ignore[index]
    assert set(re.findall(r'^ARG NOT_INSTALLED="(.*)"$', GATEWAY, re.MULTILINE)[0].split("|")) < set(needs)


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, GATEWAY], ids=["device", "gateway"])
def test_runs_as_an_unprivileged_user_and_builds_nothing(dockerfile: str) -> None:
    final = dockerfile.partition(" AS final\n")[2]
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
    assert "useradd --uid 10001" in final
    assert "pip install" not in dockerfile.partition("FROM ${PYTHON} AS final")[2]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
