"""Reference outputs by `transformers`, for models of every family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText


def load_reference(path: Path) -> Any:
    """The checkpoint's model in float32; of a multimodal one, all of it."""
    is_text = "text_config" not in json.loads((path / "config.json").read_text(encoding="utf-8"))
    kind = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    # By plain products: the fused ones have no bounds of scores.
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def greedy_tokens(path: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The next `num_tokens` token ids of each prompt, in float32, by the checkpoint in `path`; no token ends them."""
    model = load_reference(path)
    outputs = []
    for prompt in prompts:
        tokens = torch.tensor([list(prompt)])
        # Without a mask every token that equals the padding's would be hidden.
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
