"""Models by their names on the Hugging Face hub: from the cache of this host, or downloaded into it.

Only safetensors, JSON files and what a tokenizer consists of are downloaded, and nothing of it is run.
`huggingface_hub` reads `HF_HOME`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from slipstream.common.errors import CheckpointError, ConfigError

MODEL_UNIT = "DIR|ORG/NAME[@REVISION]"
"""A model, as the help shows it."""
_NAME = re.compile(r"(?P<repo>[\w][\w.-]{0,95}/[\w][\w.-]{0,95})(?:@(?P<revision>[\w][\w./-]{0,254}))?", re.ASCII)
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_LEFT_OUT = ("*/*", "consolidated*.safetensors")
"""Files of other formats: in folders, and a second copy of the weights in Mistral's layout."""
_ACCEPTED = "a directory with a model (config.json, safetensors, tokenizer.json), or ORG/NAME[@REVISION] of the hub"


def find_model(option: str, given: Path, *, may_download: bool = True) -> Path:
    """Returns the directory of a model that is given by its directory, or by its name on the hub.

    A whole copy in the cache is taken as it is, also where a branch has got further since. Raises ConfigError where
    there is neither directory nor model, and where the hub cannot be asked.
    """
    named = _NAME.fullmatch(str(given))
    if named is None or given.is_dir():
        return given
    # Imported here: it takes a second, and the gateway's image does not have it.
    try:
        import httpx
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise ConfigError(option, str(given), f"{_ACCEPTED}; huggingface_hub is not installed") from None

    def snapshot(*, local_files_only: bool) -> Path:
        path = snapshot_download(
            named["repo"],
            revision=named["revision"],
            allow_patterns=list(_FILES),
            ignore_patterns=list(_LEFT_OUT),
            local_files_only=local_files_only,
        )
        return Path(path)

    # ValueError: of a name or revision that the hub would not accept.
    failures = (ValueError, OSError, HfHubHTTPError, httpx.HTTPError)
    try:
        cached = snapshot(local_files_only=True)
        if _is_whole(cached):
            return cached
    except failures:
        pass
    if not may_download:
        raise ConfigError(option, str(given), f"{_ACCEPTED}; the cache has no whole copy of it")
    print(f"{option}: {given} is fetched from the hub", file=sys.stderr)
    try:
        return snapshot(local_files_only=False)
    except failures as error:
        raise ConfigError(option, str(given), f"{_ACCEPTED}; {_reason(error)}") from error


def _is_whole(path: Path) -> bool:
    """Returns whether a copy has all files that its index names: a download may have been interrupted."""
    from slipstream.services.models.weight_files import WeightFiles

    try:
        with WeightFiles(path, framework="numpy"):
            return (path / "config.json").is_file()
    except CheckpointError:
        return False


def _reason(error: BaseException) -> str:
    """Returns the error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__
