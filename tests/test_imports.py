"""The rules of `scripts/check_imports.py`: each finds its offences, and the project keeps them all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def check() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("check_imports", ROOT / "scripts" / "check_imports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_project_keeps_the_rules(check: Any) -> None:
    assert check.offences(ROOT) == []


def test_every_python_folder_has_its_rule(check: Any) -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")}
    assert folders - set(check.MAY_IMPORT) <= {"tests", "build", "dist"}


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("services/x.py", "from slipstream.scheduler.records import Sequence"),
        ("scheduler/x.py", "from slipstream import services"),
        ("scheduler/x.py", "from slipstream.gateway.jobs import JobManager"),
        ("gateway/x.py", "from slipstream.scheduler.records import Sequence"),
        ("common/x.py", "import slipstream.client"),
        ("client/x.py", "def f():\n    from slipstream.cli import main"),
        ("cli/x.py", "from slipstream.benchmarks.stack import Stack"),
        ("services/x.py", "from ..common import errors"),
        ("services/x.py", "from . import errors"),
        ("cli/x.py", "import common.errors"),
        ("protos/x.py", "from slipstream.common.errors import SlipstreamError"),
        ("scheduler/server.py", "from slipstream.gateway.jobs import JobManager"),
        ("examples/numpy_drafter/x.py", "from slipstream.client import AsyncClient"),
        ("examples/x.py", "from slipstream.services.models.sampler import gumbel_noise"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(check: Any, path: str, statement: str) -> None:
    assert check.direction_offences(path, statement)


def test_a_cycle_is_found_however_it_is_imported(check: Any) -> None:
    texts = {
        "common/a.py": "from slipstream.common.b import B",
        "common/b.py": "if TYPE_CHECKING:\n    from slipstream.common import c",
        "common/c.py": "def f():\n    import slipstream.common.a",
        "common/d.py": "from slipstream.common.a import A",
    }
    assert check.cycles(check.import_graph(texts)) == [["common/a.py", "common/b.py", "common/c.py", "common/a.py"]]


def test_no_cycle_without_a_way_back(check: Any) -> None:
    texts = {
        "client/__init__.py": "from slipstream.client.client import Client",
        "client/client.py": "from slipstream.client.requests import build\nfrom slipstream.common.errors import E",
        "client/requests.py": "from slipstream.common import errors",
        "common/errors.py": "import slipstream",
    }
    assert check.cycles(check.import_graph(texts)) == []


def test_folders_that_import_each_other_are_found_at_any_depth(check: Any) -> None:
    graph = check.import_graph(
        {
            "cli/main.py": "from slipstream.cli.up.run import run_up",
            "cli/signals.py": "import slipstream.common.errors",
            "cli/up/run.py": "if TYPE_CHECKING:\n    from slipstream.cli.signals import StopSignals",
            "common/errors.py": "from slipstream.common.rpc import status",
            "common/rpc/status.py": "",
        }
    )
    assert check.cycles(graph) == []
    assert check.mutual_folders(graph) == {("cli", "cli/up"): 1}
    assert check.folder_offences(graph, {("cli", "cli/up"): 1}) == []
    (offence,) = check.folder_offences(graph, {})
    assert offence.startswith("cli and cli/up import each other")


def test_a_file_of_the_wrong_length_is_found(check: Any, tmp_path: Path) -> None:
    line = "x = 1\n"
    for name, text in {
        "common/long.py": line * (check.MAX_LINES + 1),
        "common/long_pb2.py": line * (check.MAX_LINES + 1),
        "common/fits.py": line * check.MAX_LINES,
        "benchmarks/long.py": line * (check.MAX_LINES + 1),
        "common/short.py": line * (check.MIN_LINES - 1),
        "common/just_long_enough.py": line * check.MIN_LINES,
        "common/short_with_users.py": line,
        "common/one.py": "from slipstream.common.short_with_users import x\n" + line * check.MIN_LINES,
        "common/two.py": "import slipstream.common.short_with_users\n" + line * check.MIN_LINES,
        "gateway/main.py": line,
        "gateway/__init__.py": line,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert check.offences(tmp_path) == [
        f"common/long.py: {check.MAX_LINES + 1} lines, at most {check.MAX_LINES}",
        f"common/short.py: {check.MIN_LINES - 1} lines for a single user, at least {check.MIN_LINES}",
    ]
