"""The pages point at what is there, and speak of the project alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.benchmarks.figures import CPU_PAGE, GPU_PAGE, cpu_page, gpu_page, table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "bundled" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = [
    path.name for path in sorted(ROOT.iterdir()) if path.is_dir() and path.name.isalpha() and path.name != "build"
]
WRITTEN_BY_THE_READER = {"deploy/.env"}
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(rf"(?<![\w/.~$-])((?:{'|'.join(FOLDERS)})/[\w./*-]*)")
_MODULE = re.compile(r"-m (slipstream(?:\.\w+)+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_modules_that_are_no_links_are_there_as_well(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = {path.rstrip(".,/") for path in _PATH.findall(text)} - WRITTEN_BY_THE_READER
    missing = [path for path in sorted(paths) if not any(ROOT.glob(path))]
    missing += [name for name in sorted(set(_MODULE.findall(text))) if not _is_module(name)]
    assert not missing


def _is_module(name: str) -> bool:
    path = ROOT / name.removeprefix("slipstream.").replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def test_following_a_job_takes_eight_lines_with_links() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Follow one job\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\d\. ", line)]
    assert len(lines) == 8
    assert all(_LINK.search(line) for line in lines)


def test_the_figures_are_those_of_the_committed_results() -> None:
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8")
    assert cpu_page() == CPU_PAGE.read_text(encoding="utf-8")
    assert gpu_page() == GPU_PAGE.read_text(encoding="utf-8")
