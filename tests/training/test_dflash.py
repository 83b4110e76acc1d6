"""Blocks in training are those in use: the drafter that is trained has the numbers of the one that is served."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream import bundled
from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.checkpoint import load_head
from slipstream.services.models.head_config import DFLASH
from slipstream.services.models.heads import DFlashHead
from slipstream.services.models.paged_kv import PagedKV
from slipstream.training import checkpoint
from slipstream.training.dflash import BlockDrafter, BlockShape
from slipstream.training.distil_dflash import save

CPU = torch.device("cpu")
ANCHORS, NUM_TOKENS, MASK_ID = (1, 7, 15), 24, 125


@torch.inference_mode()
def test_a_block_is_the_same_in_training_and_in_use(tmp_path: Path) -> None:
    torch.manual_seed(1)
    target = checkpoint.load_for_training(bundled.target_dir()).eval()
    shape = BlockShape(target=target.shape, mask_token_id=MASK_ID, num_layers=2, block_size=5, target_layer_ids=(1, 5))
    drafter = BlockDrafter(shape, target).eval()
    for weight in drafter.parameters():
        weight.add_(0.05 * torch.randn_like(weight)).copy_(weight.to(torch.bfloat16))
    save(drafter, tmp_path)
    head = load_head(DFLASH, tmp_path, target=bundled.target_dir(), device=CPU, dtype=torch.float32)
    assert isinstance(head, DFlashHead)
    tokens = torch.randint(target.shape.vocab_size, (1, NUM_TOKENS))
    states = torch.randn(1, NUM_TOKENS, head.config.hidden_width)
    trained = drafter(tokens, states, torch.tensor([ANCHORS]), target.model.embed_tokens.weight)
    cache = PagedKV(head.config.layer, num_pages=3, page_size=16, device=CPU, dtype=torch.float32)

    def batch(first: int, width: int) -> ForwardBatch:
        positions = torch.arange(first, first + width)[None]
        return ForwardBatch(
            tokens=torch.tensor([[int(tokens[0, first])] + [MASK_ID] * (width - 1)]),
            positions=positions,
            is_valid=torch.ones_like(positions, dtype=torch.bool),
            page_table=torch.tensor([[2, 1]]),
            limits=torch.tensor([32]),
            last_seen=positions[:, -1:].expand_as(positions),
        )

    for number, anchor in enumerate(ANCHORS):
        used = head.draft(batch(anchor, 5), batch(0, anchor), head.fuse(states[:, :anchor]), cache)
        torch.testing.assert_close(used[:, 1:], trained[:, number], rtol=1e-4, atol=1e-4)
