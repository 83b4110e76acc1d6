"""The bundled model: a small target, its standalone draft, and held-out prompts, as data."""

import json
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A piece of a file that training never saw.

    ``source`` is the file's name within the standard library; ``line`` counts from 1.
    """

    id: str
    source: str
    line: int
    num_tokens: int
    text: str


def target_dir() -> Path:
    """Folder of the target model, for ``AutoModelForCausalLM.from_pretrained``."""
    return _HERE / "target"


def standalone_dir() -> Path:
    """Folder of the standalone draft model; its tokenizer is the target's."""
    return _HERE / "standalone"


def eagle3_dir() -> Path:
    """Folder of the EAGLE-3 head; embedding and tokenizer are the target's."""
    return _HERE / "eagle3"


def eagle_dir() -> Path:
    """Folder of the EAGLE head; embedding, output and tokenizer are the target's."""
    return _HERE / "eagle"


def mtp_dir() -> Path:
    """Folder of the modules for multi-token prediction; embedding, output and tokenizer are the target's."""
    return _HERE / "mtp"


def dflash_dir() -> Path:
    """Folder of the DFlash drafter; embedding, output and tokenizer are the target's."""
    return _HERE / "dflash"


def prompts() -> list[Prompt]:
    """The 64 held-out prompts, 48 to 96 tokens each."""
    lines = (_HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]
