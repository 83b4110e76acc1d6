"""Makes what a worker does from its settings: loads the model and describes it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from slipstream.common.device.manifest import DTYPE_NAMES
from slipstream.common.step import Role
from slipstream.common.worker_contract import WorkerDescription
from slipstream.services.config import EAGLE3
from slipstream.services.draft.eagle3 import Eagle3Drafter
from slipstream.services.draft.engine import DraftEngine
from slipstream.services.draft.standalone import StandaloneDrafter
from slipstream.services.language_model import LanguageModel
from slipstream.services.models.checkpoint import load_decoder, tokenizer_fingerprint
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.eagle3_checkpoint import load_eagle3
from slipstream.services.models.eagle3_config import Eagle3Config
from slipstream.services.stand_in import StandInDraft, StandInVerify
from slipstream.services.verify.engine import VerifyEngine, fused_layers

if TYPE_CHECKING:
    from slipstream.common.device.face import Device
    from slipstream.services.config import WorkerConfig
    from slipstream.services.engine import RoleEngine

logger = logging.getLogger(__name__)

CPU_DTYPE = torch.float32
"""The CPU computes in float32, whatever the checkpoint holds."""


def make_verify(config: WorkerConfig, device: Device, metrics_port: int) -> RoleEngine:
    """The verify service's side of a step. Raises CheckpointError."""
    description = _describe_verify(config, device, metrics_port)
    if config.stand_in_ms is not None:
        return StandInVerify(description, config.stand_in_ms)
    return VerifyEngine(_load(config, device), description)


def make_draft(config: WorkerConfig, device: Device, metrics_port: int) -> RoleEngine:
    """The draft service's side of a step. Raises CheckpointError."""
    is_head = config.algorithm == EAGLE3
    description = (_describe_head if is_head else _describe_draft)(config, device, metrics_port)
    if config.stand_in_ms is not None:
        return StandInDraft(description, config.stand_in_ms)
    return DraftEngine(_load_head(config, device) if is_head else StandaloneDrafter(_load(config, device)), description)


def _load(config: WorkerConfig, device: Device) -> LanguageModel:
    decoder = load_decoder(config.model, device=device.torch_device, dtype=CPU_DTYPE, on_progress=_log_progress)
    return LanguageModel(decoder, device.torch_device, CPU_DTYPE)


def _load_head(config: WorkerConfig, device: Device) -> Eagle3Drafter:
    where = device.torch_device
    head = load_eagle3(config.model, target=config.target, device=where, dtype=CPU_DTYPE, on_progress=_log_progress)
    return Eagle3Drafter(head, where, CPU_DTYPE)


def _log_progress(fraction: float) -> None:
    logger.debug("loading: %.0f %%", 100 * fraction)


def _describe_verify(config: WorkerConfig, device: Device, metrics_port: int) -> WorkerDescription:
    model = ModelConfig.from_directory(config.model)
    return replace(
        _describe(Role.VERIFY, config, model, device, metrics_port),
        hidden_width=len(fused_layers(model.num_layers)) * model.hidden_size,
        eos_token_ids=tuple(sorted(model.eos_token_ids)),
        tokenizer_path=str(config.model.resolve()),
    )


def _describe_draft(config: WorkerConfig, device: Device, metrics_port: int) -> WorkerDescription:
    model = ModelConfig.from_directory(config.model)
    return replace(_describe(Role.DRAFT, config, model, device, metrics_port), algorithm=config.algorithm)


def _describe_head(config: WorkerConfig, device: Device, metrics_port: int) -> WorkerDescription:
    head = Eagle3Config.from_directory(config.model)
    return replace(
        _describe(Role.DRAFT, config, head.layer, device, metrics_port),
        hidden_width=head.fused_width,
        hidden_layers=head.fused_layers,
        algorithm=config.algorithm,
    )


def _describe(
    role: Role, config: WorkerConfig, model: ModelConfig, device: Device, metrics_port: int
) -> WorkerDescription:
    """What all have in common; `model` has the layers that keep keys and values."""
    directory = config.model.resolve()
    tokenizer = directory
    if config.target is not None and not (directory / "tokenizer.json").is_file():
        tokenizer = config.target
    return WorkerDescription(
        role=role,
        device=device.identity,
        vocab_size=model.vocab_size,
        tokenizer_sha256=tokenizer_fingerprint(tokenizer),
        dtype=DTYPE_NAMES[CPU_DTYPE],
        max_context_tokens=model.max_position_embeddings,
        kv_bytes_per_token=model.kv_bytes_per_token(CPU_DTYPE),
        model=directory.name,
        pid=os.getpid(),
        metrics_port=metrics_port,
    )
