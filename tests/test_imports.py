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


def test_a_long_file_of_the_product_is_found(check: Any, tmp_path: Path) -> None:
    for name in ("common/long.py", "common/long_pb2.py", "benchmarks/long.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * (check.MAX_LINES + 1))
    (tmp_path / "common" / "fits.py").write_text("x = 1\n" * check.MAX_LINES)
    assert check.offences(tmp_path) == [f"common/long.py: {check.MAX_LINES + 1} lines, at most {check.MAX_LINES}"]
