"""DFlash drafters: their numbers against a plain reference, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from slipstream.common.errors import CheckpointError
from slipstream.common.wire.step import FINAL_NORM
from slipstream.services.models.attention import ForwardBatch, RaggedRows
from slipstream.services.models.checkpoint import LoadFormat, load_head
from slipstream.services.models.head_config import DFLASH, DFlashConfig
from slipstream.services.models.heads import DFlashHead
from slipstream.services.models.paged_kv import PagedKV
from tests.harness.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.harness.eagle3_checkpoints import AUTHORS, BLOCK_SIZE, BLOCKS, LLAMA_BLOCKS, MASK_ID, write_head

CPU = torch.device("cpu")
FIELDS: dict[str, Any] = {"target_layer_ids": [0, 1, 3], "mask_token_id": MASK_ID}
PAGE_TABLE, PAGE_SIZE = torch.tensor([[3, 1, 4, 6, 2]]), 4


def load(path: Path, target: Path | None) -> DFlashHead:
    """The drafter in float32."""
    head = load_head(DFLASH, path, target=target, device=CPU, dtype=torch.float32)
    assert isinstance(head, DFlashHead)
    return head


class Reference:
    """The drafter as published: without a cache, the context's states and the block at once."""

    def __init__(self, path: Path, target: Path) -> None:
        self.config = _json(path)
        self.weights = load_file(path / "model.safetensors")
        self.theirs = load_file(target / "model.safetensors")

    def logits(self, hidden: torch.Tensor, bonus: int, num_masks: int) -> torch.Tensor:
        """[L, layers * hidden] states of the positions 0 .. L-1, and the token at L, to logits at L+1 and after it."""
        w = self.weights
        context = self.norm("hidden_norm", hidden @ w["fc.weight"].T)
        tokens = torch.tensor([bonus] + [self.config["dflash_config"]["mask_token_id"]] * num_masks)
        x = self.theirs["model.embed_tokens.weight"][tokens]
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(f"layers.{number}", x, context)
        return self.norm("norm", x)[1:] @ self.theirs["lm_head.weight"].T

    def layer(self, name: str, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """A layer of the block: queries of the block, keys and values of the context and the block, without a mask."""
        w, size = self.weights, self.config["head_dim"]
        y = self.norm(f"{name}.input_layernorm", x)
        both = torch.cat((context, y))

        def heads(values: torch.Tensor, kind: str) -> torch.Tensor:
            projected = (values @ w[f"{name}.self_attn.{kind}_proj.weight"].T).view(len(values), -1, size)
            norm = f"{name}.self_attn.{kind}_norm"
            return (self.norm(norm, projected) if f"{norm}.weight" in w else projected).transpose(0, 1)

        positions = torch.arange(len(both))
        query, key = self.rotate(heads(y, "q"), positions[len(context) :]), self.rotate(heads(both, "k"), positions)
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        key, value = (part.repeat_interleave(group, dim=0) for part in (key, heads(both, "v")))
        mixed = ((query @ key.transpose(1, 2) / size**0.5).softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = x + mixed @ w[f"{name}.self_attn.o_proj.weight"].T
        y = self.norm(f"{name}.post_attention_layernorm", x)
        gate, up, down = (w[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Root mean square norm of the last dimension."""
        scale: torch.Tensor = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE over [heads, L, size]."""
        size = x.shape[-1]
        frequencies = self.config["rope_parameters"]["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def _json(path: Path) -> dict[str, Any]:
    from slipstream.services.models.json_files import read_json

    return read_json(path / "config.json")


def batch(tokens: torch.Tensor, first: int, **more: Any) -> ForwardBatch:
    """One row of [W] tokens at the positions from `first` on."""
    positions = torch.arange(first, first + len(tokens))[None]
    given: dict[str, Any] = {"is_valid": torch.ones(1, len(tokens), dtype=torch.bool)} | more
    return ForwardBatch(
        tokens=tokens[None], positions=positions, page_table=PAGE_TABLE, limits=torch.tensor([20]), **given
    )


def chunk(first: int, length: int) -> ForwardBatch:
    """A chunk of a prompt."""
    row = batch(torch.zeros(length, dtype=torch.int64), first)
    ragged = RaggedRows((length,), row.tokens[0], torch.tensor([0, length]))
    return replace(row, tokens=row.tokens[0], positions=row.positions[0], is_valid=row.is_valid[0], ragged=ragged)


@pytest.mark.parametrize("layout", [BLOCKS, LLAMA_BLOCKS])
def test_blocks_behind_chunks_and_drafted_tokens_are_as_the_reference_has_them(tmp_path: Path, layout: str) -> None:
    """A prompt in two chunks, then blocks of different sizes; each step's new tokens come with the next block."""
    target = write_checkpoint(tmp_path / "target", num_hidden_layers=6)
    path = write_head(tmp_path / "head", layout=layout, dflash_config=FIELDS)
    head, reference = load(path, target), Reference(path, target)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(13, head.config.hidden_width, generator=generator)
    cache = PagedKV(head.config.layer, num_pages=7, page_size=PAGE_SIZE, device=CPU, dtype=torch.float32)
    for first, end in ((0, 5), (5, 7)):
        head.keep(chunk(first, end - first), head.fuse(hidden[first:end]), cache)
    for known, end, bonus, num_masks in ((7, 7, 20, 7), (7, 9, 30, 3), (9, 13, 40, 6)):
        # As many of the step's states are valid as it had new tokens; those after them are of rejected drafts.
        given = torch.cat((hidden[known:end], torch.randn(2, head.config.hidden_width, generator=generator)))
        is_valid = (torch.arange(len(given)) < end - known)[None]
        context = batch(torch.zeros(len(given), dtype=torch.int64), known, is_valid=is_valid)
        block = batch(torch.tensor([bonus] + [MASK_ID] * num_masks), end)
        block = replace(block, last_seen=block.positions[:, -1:].expand_as(block.positions))
        states = head.draft(block, context, head.fuse(given)[None], cache)
        expected = reference.logits(hidden[:end], bonus, num_masks)
        torch.testing.assert_close(head.logits(states[0, 1:]), expected, rtol=1e-4, atol=1e-4)


def test_the_configuration_as_published(tmp_path: Path) -> None:
    """Layers are numbered by their outputs, and the size of a block stands in either place."""
    path = write_head(tmp_path, layout=BLOCKS, dflash_config=FIELDS)
    config = DFlashConfig.from_directory(path)
    assert (config.hidden_layers, config.hidden_width) == ((1, 2, 4), 3 * 64)
    assert (config.block_size, config.max_draft_tokens, config.mask_token_id) == (BLOCK_SIZE, BLOCK_SIZE - 1, MASK_ID)
    write_head(tmp_path, layout=BLOCKS, dflash_config=FIELDS | {"block_size": 8}, block_size=None)
    assert DFlashConfig.from_directory(path).block_size == 8


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"drop": "fc.weight"}, "missing tensors: fc.weight"),
    ({"drop": "layers.1.self_attn.q_norm.weight"}, r"missing tensors: layers\.1\.self_attn\.q_norm"),
    ({"more": "layers.0.attention_conv.base_kernel"}, "unknown tensors: .*supported: the tensors of a DFlash drafter"),
    ({"layout": AUTHORS}, "its tensors are those of algorithm eagle3, supported: dflash"),
    ({"num_hidden_layers": 3, "layer_types": None}, "missing tensors: layers.2"),
    ({"speculators_model_type": "dflash"}, "speculators_model_type: got 'dflash', supported: none"),
    ({"model_type": "gemma2"}, "model_type: got 'gemma2', supported: qwen3, llama"),
    ({"is_causal": True}, "is_causal: got True, supported: none, or False"),
    ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "layer_types: .*full_attention"),
    ({"block_size": 1}, "block_size: got 1, supported: an integer from 2 to 64"),
    ({"block_size": None}, r"dflash_config\.block_size: got None"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantization_config: got"),
    *(
        ({"dflash_config": FIELDS | {"target_layer_ids": [0]} | changes}, message)
        for changes, message in (
            ({"target_layer_ids": []}, r"dflash_config\.target_layer_ids: got \[\]"),
            ({"target_layer_ids": [-1]}, r"dflash_config\.target_layer_ids: got \[-1\]"),
            ({"mask_token_id": None}, rf"dflash_config\.mask_token_id: got None.* vocab_size = {VOCAB_SIZE}"),
            ({"mask_token_id": VOCAB_SIZE}, r"dflash_config\.mask_token_id"),
            ({"selector_rank": 256}, r"dflash_config\.selector_rank: got 256, supported: none, or 0"),
            ({"final_logit_softcapping": 20.0}, r"dflash_config\.final_logit_softcapping: got 20\.0"),
            ({"projector_type": "dspark"}, r"dflash_config\.projector_type: got 'dspark', supported: none, or dflash"),
        )
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    target = write_checkpoint(tmp_path / "target")
    path = write_head(tmp_path / "head", **{"layout": BLOCKS} | changes)
    with pytest.raises(CheckpointError, match=message) as error:
        load(path, target)
    assert "\n" not in str(error.value)


def test_the_last_layers_output_is_meant_after_the_norm(tmp_path: Path) -> None:
    """A configuration that does not say which layer is the last is refused."""
    fields = FIELDS | {"target_layer_ids": [0, 1]}
    path = write_head(tmp_path / "head", layout=BLOCKS, dflash_config=fields, num_target_layers=2)
    assert DFlashConfig.from_directory(path).hidden_layers == (1, FINAL_NORM)
    load(path, write_checkpoint(tmp_path / "target"))
    write_head(tmp_path / "head", layout=BLOCKS, dflash_config=fields)
    with pytest.raises(CheckpointError, match=r"the head reads layer 2 of its target, .* has 2"):
        load(path, write_checkpoint(tmp_path / "target"))


def test_random_weights_need_no_more_than_the_configuration(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", layout=BLOCKS)
    (path / "model.safetensors").unlink()
    head = load_head(DFLASH, path, target=None, device=CPU, dtype=torch.float32, load_format=LoadFormat.DUMMY)
    assert isinstance(head, DFlashHead)
    assert len(head.layers) == 2
