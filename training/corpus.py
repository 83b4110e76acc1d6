"""The corpus: CPython's standard library, split by file into training and held-out text."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 20

# Folders (relative, POSIX) that are not the standard library's own prose: other people's packages,
# compiled files, tables, and files that are broken on purpose.
SKIPPED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "lib-dynload",
    "encodings",
    "pydoc_data",
    "idlelib/Icons",
    "lib2to3/tests/data",
    "test/encoded_modules",
    "test/cjkencodings",
)
# Generated tables; the configuration data also holds paths of the machine Python was built on.
SKIPPED_NAMES = ("_sysconfigdata", "html/entities.py", "test/test_stringprep.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the corpus. ``name`` is its POSIX path relative to the standard library."""

    name: str
    text: str

    @property
    def split(self) -> Split:
        """Its side by a hash of only the name, so that a file stays on its side when others change."""
        digest = hashlib.sha256(self.name.encode()).digest()
        held_out = int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0
        return "heldout" if held_out else "train"

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8."""
        return len(self.text.encode())


def is_skipped(name: str) -> bool:
    """True if the file with this relative name is left out of the corpus."""
    parts = name.split("/")
    if any(part.startswith(("config-", "__pycache__")) for part in parts[:-1]):
        return True
    if any(name.startswith(folder + "/") for folder in SKIPPED_FOLDERS):
        return True
    return name.startswith(SKIPPED_NAMES)


def collect(stdlib: Path) -> Iterator[SourceFile]:
    """Yield the files in order of name: Python, UTF-8, not empty, without exact duplicates."""
    seen: set[bytes] = set()
    for name in sorted(path.relative_to(stdlib).as_posix() for path in stdlib.rglob("*.py")):
        if is_skipped(name):
            continue
        raw = (stdlib / name).read_bytes()
        digest = hashlib.sha256(raw).digest()
        if not raw.strip() or digest in seen:
            continue
        seen.add(digest)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        yield SourceFile(name=name, text=text)


def load(corpus: Path) -> list[SourceFile]:
    """Read back what the command wrote to the folder ``corpus``."""
    lines = (corpus / "files.jsonl").read_text().splitlines()
    return [SourceFile(**json.loads(line)) for line in lines]


def summary(files: list[SourceFile]) -> dict[str, object]:
    """Counts per split and one hash over all names and texts."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.text.encode() + b"\0")
    counts: dict[str, object] = {"sha256": digest.hexdigest()}
    for split in ("train", "heldout"):
        chosen = [file for file in files if file.split == split]
        counts[split] = {"files": len(chosen), "bytes": sum(file.num_bytes for file in chosen)}
    return counts


def main(
    out: Annotated[Path, typer.Option(help="Folder for files.jsonl and corpus.json.")],
    stdlib: Annotated[Path | None, typer.Option(help="Standard library; default: this interpreter's own.")] = None,
) -> None:
    """Collect the standard library's Python files and split them by file."""
    files = list(collect(stdlib or Path(sysconfig.get_path("stdlib"))))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "files.jsonl").open("w") as stream:
        for file in files:
            stream.write(json.dumps({"name": file.name, "text": file.text}) + "\n")
    counts = {"python": sysconfig.get_python_version(), **summary(files)}
    (out / "corpus.json").write_text(json.dumps(counts, indent=2) + "\n")
    typer.echo(json.dumps(counts, indent=2))


if __name__ == "__main__":
    typer.run(main)
