"""The least time of a decode step: the bytes that it must read, over the bandwidth of a copy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.eagle3 import Eagle3Config, Eagle3Head

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

COPIED_BYTES = 4 << 30
REPEATS = 20
META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes that a step reads at least: each weight, and keys and values of the context, once a forward."""

    verify_weights: int
    draft_weights: int
    """Of all forwards of a step, as below."""
    verify_kv_per_token: int
    draft_kv_per_token: int

    @classmethod
    def of(cls, target: Path, draft: Path, *, num_draft_tokens: int, dtype: torch.dtype) -> StepBytes:
        """A target and an EAGLE-3 head in these directories that compute in `dtype`."""
        config = ModelConfig.from_directory(target)
        head = Eagle3Config.from_directory(draft)
        model = Eagle3Head(head, device=META, dtype=dtype)
        once = model.fc.weight.nbytes if model.fc.weight is not None else 0
        return cls(
            verify_weights=_weights(Decoder(config, device=META, dtype=dtype), is_tied=config.tie_word_embeddings),
            draft_weights=once + num_draft_tokens * (_weights(model, is_tied=False) - once),
            verify_kv_per_token=config.kv_bytes_per_token(dtype),
            draft_kv_per_token=num_draft_tokens * head.layer.kv_bytes_per_token(dtype),
        )

    def verify_s(self, bandwidth: float, context_tokens: float, batch: int) -> float:
        """Seconds of verify's part."""
        return (self.verify_weights + batch * context_tokens * self.verify_kv_per_token) / bandwidth

    def draft_s(self, bandwidth: float, context_tokens: float, batch: int) -> float:
        """Seconds of draft's part."""
        return (self.draft_weights + batch * context_tokens * self.draft_kv_per_token) / bandwidth


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy on the GPU."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * COPIED_BYTES / median(elapsed_us(partial(target.copy_, source)) for _ in range(REPEATS))
    del source, target
    torch.cuda.empty_cache()
    return 1e6 * rate


def elapsed_us(work: Callable[[], object]) -> float:
    """Microseconds of work on the current stream, which is idle before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms * 1e3


def _weights(model: nn.Module, *, is_tied: bool) -> int:
    """Bytes of the weights that a forward reads: only a few rows of the embedding, unless it is the head, too."""
    parameters = dict(model.named_parameters())
    if not is_tied:
        del parameters["embedding"]
    return sum(math.prod(parameter.shape) * parameter.dtype.itemsize for parameter in parameters.values())
