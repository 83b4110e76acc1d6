"""Checks of what `slipstream up` is to serve, before anything is started: without PyTorch, which takes seconds."""

from __future__ import annotations

import ctypes
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from slipstream.cli.model_choice import ModelChoice

CUDA = "cuda"


def check_models(models: ModelChoice, *, needs_weights: bool = True) -> None:
    """Raises CheckpointError if a model cannot be served, or the draft does not fit the target."""
    describe_target(models, needs_weights=needs_weights)
    if models.draft is not None:
        describe_draft(models, needs_weights=needs_weights)


def describe_target(models: ModelChoice, *, needs_weights: bool = True) -> str:
    """What the target is, for people. Raises CheckpointError if it cannot be served."""
    # Imported here and below: the gateway's image has the commands, and nothing that loads models.
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.json_files import tokenizer_fingerprint

    architecture = ModelConfig.from_directory(models.target).architecture
    tokenizer_fingerprint(models.target)
    if needs_weights:
        _check_weights(models.target)
    return architecture


def describe_draft(models: ModelChoice, *, needs_weights: bool = True) -> str:
    """What the draft model is, for people. Raises CheckpointError if it cannot draft for the target."""
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.head_config import HEADS, check_target
    from slipstream.services.models.json_files import tokenizer_fingerprint

    path, head = models.draft, HEADS.get(models.algorithm)
    assert path is not None, "there is a draft model"
    if head is None:
        name = ModelConfig.from_directory(path).architecture
    else:
        name = head.name
        check_target(path, head.config(path), models.target)
    has_tokenizer = head is None or (path / "tokenizer.json").is_file()
    if has_tokenizer and tokenizer_fingerprint(path) != tokenizer_fingerprint(models.target):
        raise CheckpointError(f"{path}: its tokenizer is not that of the target, {models.target}")
    if needs_weights:
        _check_weights(path)
    return name + (", with the target's tokenizer" if has_tokenizer else "")


def _check_weights(path: Path) -> None:
    from slipstream.services.models.weight_files import WeightFiles

    with WeightFiles(path, framework="numpy"):
        pass


def check_device(device: str) -> None:
    """Raises ConfigError if a GPU is asked for and cannot be used, as far as that can be told without PyTorch."""
    if device != CUDA:
        return
    if (torch := find_spec("torch")) is not None and torch.origin is not None:
        version = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
        if version.get("cuda") is None:
            reason = "this PyTorch was built without CUDA; install a build for your driver"
            raise ConfigError("device", device, f"cpu here: {reason}")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError("device", device, "cpu here: there is no libcuda.so.1, of NVIDIA's driver") from None
