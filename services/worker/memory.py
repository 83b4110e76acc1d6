"""What a worker says of its device's memory: for the scheduler to give the rest to KV pages, and where it runs out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import OutOfMemoryError
from slipstream.common.worker.contract import DeviceMemory

if TYPE_CHECKING:
    from torch import nn

    from slipstream.common.worker.contract import Attachment, WorkerDescription
    from slipstream.services.models.config import ModelConfig

MIB = 2**20
WORK_BYTES = 512 * 2**20
"""Graphs, and the workspaces of libraries: as measured on one GPU, rounded up."""
_LOGIT_BYTES = 16
"""Logits as they are computed, in float32, adjusted, and what penalties count."""

_WORDS = ("out of memory", "allocate memory", "not enough memory", "ALLOC_FAILED")
"""Of errors that are no `torch.OutOfMemoryError`: the driver's, Triton's, cuBLAS's, and a CPU's."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory is what an error of PyTorch's, or of what it calls, is about."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)


def too_large(model: nn.Module, name: str, device: torch.device, error: RuntimeError) -> OutOfMemoryError:
    """What to say when weights do not fit. `model`: the same on the meta device; `name`: for people."""
    needed = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    there = "the host's memory is too small"
    if device.type == "cuda":
        free, total = (size / MIB for size in torch.cuda.mem_get_info(device))
        there = f"{free:.0f} MiB of the GPU's {total:.0f} MiB are free"
    return OutOfMemoryError(
        f"the weights of {name} take {needed:.0f} MiB, and {there}: end who else uses it, or take a smaller model or "
        f"dtype ({first_line(error)})"
    )


def no_room(
    description: WorkerDescription, attachment: Attachment, weights: int, error: torch.OutOfMemoryError
) -> OutOfMemoryError:
    """What to say when an epoch does not fit. `weights`: bytes."""
    kv_mib = attachment.num_pages * attachment.page_tokens * description.kv_bytes_per_token / MIB
    return OutOfMemoryError(
        f"{description.role.value} ran out of GPU memory: weights {weights / MIB:.0f} MiB, {attachment.num_pages} KV "
        f"pages {kv_mib:.0f} MiB, the rest for graphs and steps. Less is needed with a smaller kv_memory_mib, slots or "
        f"chunk_tokens ({first_line(error)})"
    )


def first_line(error: BaseException) -> str:
    """Of its message: PyTorch adds paragraphs."""
    return str(error).partition("\n")[0]


def needed_for_work(config: ModelConfig, dtype: torch.dtype) -> DeviceMemory:
    """What a model's steps will take: for each token that goes through its layers, and for each that is chosen."""
    layer = 4 * config.hidden_size + 2 * (config.q_size + 2 * config.kv_size) + 3 * config.intermediate_size
    per_choice = config.vocab_size * _LOGIT_BYTES
    return DeviceMemory(work=WORK_BYTES, work_per_token=layer * dtype.itemsize, work_per_choice=per_choice)


def measured(needed: DeviceMemory, device: torch.device, weights: int) -> DeviceMemory:
    """The same with what there is now. Memory of the host is not counted."""
    if device.type != "cuda":
        return DeviceMemory()
    free, total = torch.cuda.mem_get_info(device)
    return replace(needed, total=total, free=free, weights=weights)


def allocated_bytes(device: torch.device) -> int:
    """What this process has taken for tensors; what PyTorch keeps for later is given back first."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)
