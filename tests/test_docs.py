"""The pages name files, sections, classes and commands that exist, and their figures are those of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
from smg_grpc_proto import vllm_engine_pb2

from slipstream.benchmarks.figures import MARK, filled
from slipstream.benchmarks.figures import PAGES as FIGURES
from slipstream.cli.main import app

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING, GLOSSARY = ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "glossary.md"
PAGES = [README, CONTRIBUTING, *sorted(ROOT.glob("[a-z]*/README.md")), *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = [
    path.name for path in sorted(ROOT.iterdir()) if path.is_dir() and path.name.isalpha() and path.name != "build"
]
PRODUCT = ("common", "gateway", "scheduler", "services", "client", "door", "cli")
WRITTEN_BY_THE_READER = {"deploy/.env"}
MOST_WORDS = 1200
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(?:#([^)]*))?\)")
_PATH = re.compile(rf"(?<![\w/.~$-])((?:{'|'.join(FOLDERS)})/[\w./*-]*)")
_FILE = re.compile(r"`([\w/.-]+\.(?:py|md|proto|toml|yaml|yml|svg))`")
_MODULE = re.compile(r"(?:`|-m |from |import )((?:slipstream|tests)(?!\.v1)(?:\.\w+)+)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def links_of(page: Path) -> list[tuple[str, str, str]]:
    """Text, path and anchor of each link to a file of the repository."""
    return [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link[1]]


@each_page
def test_links_lead_to_files_and_sections_that_exist(page: Path) -> None:
    missing = []
    for _, path, anchor in links_of(page):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            missing.append(f"{path}#{anchor}")
    assert not missing


@each_page
def test_a_link_leads_to_the_file_that_it_names(page: Path) -> None:
    named = [(text.strip("`"), path) for text, path, _ in links_of(page) if _FILE.fullmatch(text)]
    assert [link for link in named if not f"/{link[1]}".endswith(f"/{link[0]}")] == []


@each_page
def test_paths_and_modules_that_are_no_links_are_there_as_well(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = {path.rstrip(".,/") for path in _PATH.findall(text)} - WRITTEN_BY_THE_READER
    missing = [path for path in sorted(paths) if not any(ROOT.glob(path))]
    missing += [name for name in sorted(set(_MODULE.findall(text))) if not _is_there(name)]
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
    names |= {path.name for path in ROOT.glob("*.*")}
    missing += [path for path in sorted(set(_FILE.findall(text))) if path.rpartition("/")[2] not in names]
    assert not missing


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _is_there(name: str) -> bool:
    """True if a dotted name is a module, or a name in a module."""
    path = ROOT / name.removeprefix("slipstream.").replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    module = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    return module.exists() and bool(re.search(rf"\b{path.name}\b", module.read_text(encoding="utf-8")))


@each_page
def test_classes_exist(page: Path) -> None:
    named = set(re.findall(r"`([A-Z][a-z]\w*)`", page.read_text(encoding="utf-8")))
    sources = [path.read_text(encoding="utf-8") for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    classes = {name for source in sources for name in re.findall(r"^class (\w+)", source, re.MULTILINE)}
    wire = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "protos").glob("*.proto"))
    classes.update(re.findall(r"(?:service|rpc|message) (\w+)", wire))
    engine = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    classes.update((engine.name, *(method.name for method in engine.methods)))
    # The names in `architectures` are those of other projects' classes.
    theirs = {
        name for name in named if re.search(r"(ForCausalLM\w*|ForConditionalGeneration|DraftModel|Speculator)$", name)
    }
    assert sorted(named - classes - theirs) == []
    assert page != GLOSSARY or len(named) > 30


def test_the_glossary_has_only_words_that_are_ours() -> None:
    rows = re.findall(r"^\| (?!word )(.+?) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert 40 < len(rows) <= 80


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    made = {name for names in re.findall(r"(?:^|`)make ((?:[a-z-]+ ?)+)", text, re.MULTILINE) for name in names.split()}
    assert sorted(made - targets) == []
    called = set(re.findall(r"(?:^|`)slipstream ([a-z-]+)", text, re.MULTILINE))
    assert sorted(called - set(typer.main.get_group(app).commands)) == []


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_following_a_job_takes_eight_lines_with_links() -> None:
    section = README.read_text(encoding="utf-8").split("## Follow one job\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\d\. ", line)]
    assert len(lines) == 8
    assert all(_LINK.search(line) for line in lines)


def test_the_readme_has_one_table_of_at_most_eight_figures() -> None:
    section = README.read_text(encoding="utf-8").split("<!-- table: readme -->")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert 2 < len(rows) <= 2 + 8


@pytest.mark.parametrize("page", FIGURES, ids=lambda page: page.stem)
def test_the_figures_are_those_of_the_committed_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert MARK.search(text)
    assert filled(text) == text
    assert filled(MARK.sub(r"\1\6", text)) == text
