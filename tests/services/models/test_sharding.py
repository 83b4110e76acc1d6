"""A model that lies on several ranks computes what it computes on one."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.common.errors import ConfigError
from slipstream.services.models.attention import JoinedBatch
from slipstream.services.models.checkpoint import load_decoder
from slipstream.services.models.config import ModelConfig, Rank
from slipstream.services.models.decoder import Decoder, RMSNorm
from slipstream.services.models.linear import Linear, dequantised
from slipstream.services.models.ranks import Ranks
from slipstream.services.models.sharding import sharded
from slipstream.services.models.weight_files import WeightFiles
from slipstream.services.worker.config import WorkerConfig
from tests.harness.checkpoints import write_checkpoint
from tests.harness.fp8_checkpoints import FP8_LAYOUTS, quantise
from tests.harness.packed_checkpoints import LAYOUTS, pack, pack_experts
from tests.harness.paged_model import CPU, PagedModel, random_tokens
from tests.harness.threaded_ranks import ranked_model
from tests.harness.transformers_checkpoints import VARIANTS, load_reference, write_by_transformers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_have_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    path = write_by_transformers(tmp_path / "it", name, seed=11, has_tokenizer=False)
    prompts = [random_tokens(60, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        expected = load_reference(path)(torch.tensor(prompts)).logits
    with ranked_model(path, 2) as model:
        found = model.run(model.batch([(0, prompt) for prompt in prompts]))
        in_chunks = model.prefill(prompts[0], chunk=16, row=3)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(in_chunks, expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 2), (2, 1), (4, 2), pytest.param(8, 4)])
def test_key_heads_are_split_or_copied_and_the_vocabulary_padded(
    tmp_path: Path, num_ranks: int, num_kv_heads: int
) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": num_kv_heads, "vocab_size": 270, "head_dim": 16}
    path = write_checkpoint(tmp_path / "it", seed=3, has_tokenizer=False, **sizes)
    whole, prompt = PagedModel(path), random_tokens(40, seed=2, vocab_size=270)
    with ranked_model(path, num_ranks) as model:
        config, layer = model.decoder.config, model.decoder.layers[0]
        assert (config.num_heads, config.num_kv_heads) == (8 // num_ranks, max(1, num_kv_heads // num_ranks))
        assert layer.qkv.plain_weight.shape == ((8 // num_ranks + 2 * config.num_kv_heads) * 16, 64)
        assert layer.down.plain_weight.shape == (64, 96 // num_ranks)
        assert len(model.decoder.embedding) == -(-270 // num_ranks)
        found = model.prefill(prompt, chunk=16)
    assert found.shape == (40, 270)
    torch.testing.assert_close(found, whole.prefill(prompt, chunk=16), atol=1e-4, rtol=0)


def test_what_is_computed_beside_a_token_changes_no_bit(tmp_path: Path) -> None:
    """Sums that depend on the place of a number would."""
    path = write_checkpoint(tmp_path / "it", seed=4, has_tokenizer=False)
    rows = [(0, random_tokens(width, seed=width)) for width in (9, 5, 7)]
    with ranked_model(path, 4) as model:
        alone = [model.run(model.batch([row], first_row=number)) for number, row in enumerate(rows)]
        together = model.run(model.batch(rows))
        parts = [model.batch([row], first_row=number) for number, row in enumerate(rows)]
        output = model.decoder.forward(JoinedBatch.of(*parts), model.cache, aux_layers=(1,))
        joined = model.decoder.logits(output.hidden)
    for number, (_, tokens) in enumerate(rows):
        assert torch.equal(alone[number][0], together[number, : len(tokens)])
    assert torch.equal(joined, torch.cat([logits[0] for logits in alone]))
    assert output.aux is not None
    assert output.aux.shape == (21, 64)


def test_ranks_are_gone_with_their_model(tmp_path: Path) -> None:
    """Else the collector would end their store at any time, and wait there for a file that is gone."""
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False)
    gc.disable()
    try:
        with ranked_model(path, 2) as model:
            ranks = weakref.ref(model.decoder.ranks)
        del model
        assert ranks() is None
    finally:
        gc.enable()


def test_a_rank_reads_only_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False)
    num_read: list[int] = []
    read = WeightFiles.read

    def counted(files: WeightFiles, name: str, *part: slice) -> torch.Tensor:
        tensor = read(files, name, *part)
        num_read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(WeightFiles, "read", counted)
    whole = load_decoder(path, device=CPU, dtype=torch.float32)
    num_whole, small = (
        sum(num_read),
        sum(module.weight.numel() for module in whole.modules() if isinstance(module, RMSNorm)),
    )
    num_read.clear()
    with ranked_model(path, 2):
        pass
    assert sum(num_read) == num_whole + small


@pytest.mark.parametrize(
    ("changes", "size", "accepted"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "a divisor of num_attention_heads = 6"),
        (
            {"num_key_value_heads": 3, "num_attention_heads": 12},
            2,
            "a divisor or a multiple of num_key_value_heads = 3",
        ),
        ({"intermediate_size": 90}, 4, "a divisor of intermediate_size = 90"),
    ],
)
def test_sizes_that_cannot_be_divided(tmp_path: Path, changes: dict[str, Any], size: int, accepted: str) -> None:
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False, **changes)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: got {size}, accepted: {accepted}"):
        sharded(ModelConfig.from_directory(path), Rank(0, size))


def test_experts_that_cannot_be_divided(tmp_path: Path) -> None:
    path = write_by_transformers(tmp_path / "it", "qwen3-moe", has_tokenizer=False, moe_intermediate_size=25)
    with pytest.raises(ConfigError, match="a divisor of moe_intermediate_size = 25"):
        sharded(ModelConfig.from_directory(path), Rank(0, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: got 3, accepted: 1, 2, 4, 8"),
        (
            {"tensor_parallel_size": 2, "share_weights": True},
            "share_weights: got True, accepted: off with tensor_parallel",
        ),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerConfig(model=tmp_path, **settings)


class Apart(Ranks):
    """A rank that only loads."""

    def _meet(self, store: Any) -> None:
        assert store is None


def weights_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """By name, in float32."""
    found = {}
    for name, module in decoder.named_modules():
        if isinstance(module, Linear) and module.weight is not None:
            weight, scales = module.weight, module.scales
            found[name] = weight.float() if scales is None else dequantised(weight, scales)
    return found


@pytest.mark.parametrize("layout", FP8_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_weights_are_split_with_their_scales(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    """In bfloat16 they stay FP8. In float32 ranks divide a block whose numbers share a scale, too."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    width = 512 if dtype == torch.bfloat16 else 384
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False, intermediate_size=width, num_hidden_layers=1, **sizes)
    quantise(path, layout)
    load = partial(load_decoder, path, device=CPU, dtype=dtype)
    monolith = weights_of(load())
    parts = [weights_of(load(ranks=Apart(Rank(number, 2), None))) for number in range(2)]
    if dtype == torch.bfloat16:
        assert len(monolith) == 5
        rows = {"qkv": (512, 256, 256), "gate_up": (512, 512)}
        for name, whole in monolith.items():
            if (sizes_of := rows.get(name.rpartition(".")[2])) is not None:
                pairs = zip(*(part[name].split([size // 2 for size in sizes_of]) for part in parts), strict=True)
                joined = torch.cat([half for pair in pairs for half in pair])
            else:
                joined = torch.cat([part[name] for part in parts], dim=0 if name == "head" else 1)
            assert torch.equal(joined, whole), name
    else:
        prompt = random_tokens(20, seed=5)
        with ranked_model(path, 2) as model:
            found = model.prefill(prompt, chunk=20)
        torch.testing.assert_close(found, PagedModel(path).prefill(prompt, chunk=20), atol=2e-3, rtol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_weights_are_split(tmp_path: Path, layout: str) -> None:
    """Groups of columns may lie on both ranks."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 160}
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False, **sizes)  # type: ignore[arg-type]
    pack(path, layout)
    prompt = random_tokens(20, seed=5)
    with ranked_model(path, 2) as model:
        found = model.prefill(prompt, chunk=20)
    torch.testing.assert_close(found, PagedModel(path).prefill(prompt, chunk=20), atol=2e-3, rtol=1e-4)


def test_experts_in_mxfp4_are_not_split(tmp_path: Path) -> None:
    path = write_by_transformers(tmp_path / "it", "gpt-oss", has_tokenizer=False)
    pack_experts(path)
    with pytest.raises(ConfigError, match="tensor_parallel_size: got 2, accepted: 1 with weights in MXFP4"):
        sharded(ModelConfig.from_directory(path), Rank(0, 2))
