"""The wheel that users install: it has the files for operators, and no module that only developers can import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.compose_files import DEPLOY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = DEPLOY.parent
ONLY_OURS = ("grafana_foundation_sdk", "matplotlib", "psutil", "pytest", "yaml")
"""Packages that only the extra dev brings."""
IMPORT_ALL = f"""
import importlib, sys
from pathlib import Path

if (Path(sys.argv[1]) / "ray").exists():
    import ray.serve  # it needs some of these, and brings them
for name in {ONLY_OURS}:
    sys.modules[name] = None
for path in sorted(Path(sys.argv[1]).rglob("*.py")):
    name = ".".join(path.relative_to(Path(sys.argv[1]).parent.parent).with_suffix("").parts)
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert Path(module.__file__) == path, module.__file__
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of this tree installs; it is built from a copy, as a build leaves files behind."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    tracked = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(source))
    subprocess.run((*pip, *build), check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run((*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)), check=True)
    return target / "slipstream"


def test_files_for_operators_are_there(installed: Path) -> None:
    names = subprocess.run(("git", "ls-files", "deploy"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = {ROOT / name for name in names.split() if not name.endswith((".py", "py.typed"))}
    assert {ROOT / "deploy" / name for name in ("compose.yaml", "smg/serve", "prometheus/rules/alerts.yml")} < expected
    for path in expected:
        found = installed / path.relative_to(ROOT)
        assert found.read_bytes() == path.read_bytes(), found
        assert os.access(found, os.X_OK) == os.access(path, os.X_OK), found


def test_what_needs_the_extra_dev_is_not_there(installed: Path) -> None:
    for folder in ("deploy", "client", "bundled"):
        subprocess.run(
            (sys.executable, "-P", "-c", IMPORT_ALL, str(installed / folder)),
            env={**os.environ, "PYTHONPATH": str(installed.parent)},
            check=True,
        )
