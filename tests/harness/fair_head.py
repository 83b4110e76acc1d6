"""EAGLE-3 heads with random weights that are right at times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from slipstream.common.device.cpu.device import HostDevice
from slipstream.services.worker.config import EAGLE3, WorkerConfig
from slipstream.services.worker.factory import make_draft
from tests.harness.checkpoints import VOCAB_SIZE, write_weights
from tests.harness.eagle3_checkpoints import LAYOUTS, write_head

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.services.worker.engine import RoleEngine


def make_head(path: Path, target: Path, layout: str = LAYOUTS[0]) -> RoleEngine:
    """A head that sees little of its states and much of the target's own first guess, so that it is right at times."""
    write_head(path, layout=layout, has_embedding=False, has_tokenizer=False, draft_vocab_size=VOCAB_SIZE)
    weights = load_file(path / "model.safetensors")
    own = load_file(target / "model.safetensors")
    hidden = weights["fc.weight"].shape[0]
    weights["fc.weight"] = torch.cat((torch.zeros(hidden, 2 * hidden), torch.eye(hidden)), dim=1)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= 0.02
    weights["norm.weight"], weights["lm_head.weight"] = own["model.norm.weight"], own["lm_head.weight"]
    write_weights(path, {name: tensor.contiguous() for name, tensor in weights.items()})
    return make_draft(WorkerConfig(model=path, target=target, algorithm=EAGLE3), HostDevice(), 0)
