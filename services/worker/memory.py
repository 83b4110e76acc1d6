"""Measures a worker's device memory, for the scheduler's plan of KV pages, and words errors when it runs out."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import OutOfMemoryError
from slipstream.common.host import host_bytes
from slipstream.common.wire.worker import DeviceMemory
from slipstream.services.worker.config import NGRAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from slipstream.common.wire.worker import Attachment, WorkerDescription
    from slipstream.services.models.config import ModelConfig

MIB = 2**20
WORK_BYTES = 512 * MIB
"""Graphs, and the workspaces of libraries: as measured on one GPU, rounded up."""
MOST_PADDING, PADDING_SHARE = 128, 16
"""A forward has less padding than MOST_PADDING tokens, or than one in PADDING_SHARE."""
_LOGIT_BYTES = 16
"""Per entry of the vocabulary: logits as computed, in float32, adjusted, and the counts of penalties."""

_WORDS = ("out of memory", "allocate memory", "not enough memory", "ALLOC_FAILED")
"""Words in errors that are no `torch.OutOfMemoryError`: the driver's, Triton's, cuBLAS's, and a CPU's."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Returns whether an error of PyTorch, or of a library below it, is about memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)


@contextmanager
def loading(name: str, device: torch.device, make_empty: Callable[[torch.device], nn.Module]) -> Iterator[None]:
    """Raises OutOfMemoryError when weights do not fit, on a CPU before any is made.

    `name`: of the model, for the message. `make_empty`: makes the same model on a device, here on one without memory.
    """

    def needed() -> int:
        return sum(parameter.nbytes for parameter in make_empty(torch.device("meta")).parameters())

    # The host gives away more memory than it has, and ends a process that then uses it.
    if device.type == "cpu" and (needed_bytes := needed()) > host_bytes():
        raise _weights_too_large(name, needed_bytes, _place(device))
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise _weights_too_large(name, needed(), _place(device), f" ({first_line(error)})") from error


def _weights_too_large(name: str, needed: int, there: str, reason: str = "") -> OutOfMemoryError:
    message = f"the weights of {name} take {needed / MIB:.0f} MiB, and {there}"
    return OutOfMemoryError(f"{message}: end who else uses it, or take a smaller model or dtype{reason}")


def no_room(
    description: WorkerDescription, attachment: Attachment, device: torch.device, weights: int, error: RuntimeError
) -> OutOfMemoryError:
    """The error when an epoch does not fit. `weights`: bytes."""
    kv_mib = attachment.num_pages * attachment.page_tokens * description.kv_bytes_per_token / MIB
    options = ["context_tokens", "kv_memory_mib", "slots", "max_batched_tokens"]
    if description.algorithm == NGRAM:
        options.append("suffix_cache_tokens")
    return OutOfMemoryError(
        f"{description.role.value} ran out of memory: weights {weights / MIB:.0f} MiB, {attachment.num_pages} KV pages "
        f"{kv_mib:.0f} MiB, the rest for graphs and steps, and {_place(device)}. Less is needed with a smaller "
        f"{', '.join(options[:-1])} or {options[-1]} ({first_line(error)})"
    )


def _place(device: torch.device) -> str:
    """The memory that there is, in words."""
    if device.type != "cuda":
        return f"the host has {host_bytes() / MIB:.0f} MiB"
    free, total = (size / MIB for size in torch.cuda.mem_get_info(device))
    return f"{free:.0f} MiB of the GPU's {total:.0f} MiB are free"


def first_line(error: BaseException) -> str:
    """First line of the message: PyTorch adds paragraphs."""
    return str(error).partition("\n")[0]


def needed_for_work(config: ModelConfig, dtype: torch.dtype) -> DeviceMemory:
    """Memory that a model's steps will take, by token in the forward and by sampled token, with what padding takes."""
    qkv, gate_up = config.q_size + 2 * config.kv_size, 2 * config.intermediate_size
    # A prompt's product makes a quantised weight in the dtype that is computed in (`fp8_linear`).
    is_quantised = config.fp8 is not None or config.packed is not None
    made = max(qkv, gate_up) * config.hidden_size * dtype.itemsize if is_quantised else 0
    per_token = (4 * config.hidden_size + 2 * qkv + config.mlp_numbers_per_token) * dtype.itemsize
    per_choice = config.vocab_size * _LOGIT_BYTES
    padding = MOST_PADDING * (per_token + config.vocab_size * dtype.itemsize)
    return DeviceMemory(
        work=WORK_BYTES + made + padding,
        work_per_token=per_token + -(-per_token // PADDING_SHARE),
        work_per_choice=per_choice,
    )


def with_hidden_states(needed: DeviceMemory, width: int, dtype: torch.dtype) -> DeviceMemory:
    """Adds the target's states that a draft reads: in the memory where verify leaves them, and the draft's own copy.

    `width`: numbers of a token's states.
    """
    num_bytes = 2 * width * dtype.itemsize
    per_token, per_choice = needed.work_per_token + num_bytes, needed.work_per_choice + num_bytes
    return replace(needed, work_per_token=per_token, work_per_choice=per_choice)


def measured(needed: DeviceMemory, device: torch.device, weights: int) -> DeviceMemory:
    """Returns `needed` with the device's memory of the moment. Memory of the host is not counted."""
    if device.type != "cuda":
        return DeviceMemory()
    free, total = torch.cuda.mem_get_info(device)
    return replace(needed, total=total, free=free, weights=weights)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of this process's tensors. Gives PyTorch's unused memory back to the device first."""
    give_back_unused(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def give_back_unused(device: torch.device) -> None:
    """Gives the memory that PyTorch keeps and no tensor has back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
