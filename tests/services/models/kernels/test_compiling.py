"""The kernels compile for a Hopper GPU, also where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
SERVICES = ROOT / "services"
MODULES = (*(SERVICES / "models" / "kernels").glob("*.py"), SERVICES / "draft" / "fused_suffix_cache.py")
TESTS = {
    ("step_ops",): ("step_ops",),
    ("paged_attention", "fp8_pages"): ("attention_kernels", "paged_attention"),
    ("block_ops", "rotate_and_keep"): ("block_ops",),
    ("products",): ("products",),
    ("grouped",): ("grouped", "routing"),
    ("fp8",): ("fp8",),
    ("ints",): ("ints",),
    ("masks",): ("masks",),
    ("sampling",): ("sampling", "token_scores"),
    ("suffix_ring",): ("fused_suffix_cache",),
}
"""The modules whose kernels some files of tests launch; together all that have any."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tests", TESTS, ids="-".join)
def test_kernels_compile(tests: tuple[str, ...], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PYTEST"))}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    plugin = f"{__package__ or 'tests.services.models.kernels'}.compiling"
    command = (sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-q", "--tb=no")
    run = subprocess.run(
        (*command, *(HERE / f"test_{name}.py" for name in tests)),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot compile" not in run.stdout, run.stdout[-5000:]
    compiled = set(re.findall(r"^compiled (\w+)$", run.stdout, re.MULTILINE))
    assert compiled >= set().union(*map(_kernels_of, TESTS[tests])), (compiled, run.stdout[-2000:], run.stderr[-2000:])


def test_no_module_is_left_out() -> None:
    named = {module for modules in TESTS.values() for module in modules}
    assert {path.stem for path in MODULES if _kernels_of(path.stem)} == named


def _kernels_of(module: str) -> set[str]:
    """The kernels that are launched, which by name end so; other functions are parts of them."""
    (path,) = (path for path in MODULES if path.stem == module)
    return set(re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
