"""Makes small draft heads with random weights, in the layouts that are around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slipstream.common.device.cpu.device import HostDevice
from slipstream.services.factory import make_draft
from slipstream.services.models.head_config import DFLASH, EAGLE, EAGLE3, MTP
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.checkpoints import (
    FAMILIES,
    LLAMA,
    VOCAB_SIZE,
    random_weights,
    write_json,
    write_tokenizer,
    write_weights,
)

AUTHORS = "authors"
SPECULATORS = "speculators"
EAGLE_AUTHORS = "eagle"
"""Of EAGLE-1 and EAGLE-2: embedding and output are the target's."""
MODULES = "modules"
"""Of DeepSeek: embedding and output are the target's."""
BLOCKS, LLAMA_BLOCKS = "blocks", "llama-blocks"
"""Of DFlash, with layers as Qwen3's or Llama's: embedding and output are the target's."""
LAYOUTS = (AUTHORS, SPECULATORS, EAGLE_AUTHORS)
ALGORITHMS = {
    AUTHORS: EAGLE3,
    SPECULATORS: EAGLE3,
    EAGLE_AUTHORS: EAGLE,
    MODULES: MTP,
    BLOCKS: DFLASH,
    LLAMA_BLOCKS: DFLASH,
}
BLOCK_SIZE, MASK_ID = 16, VOCAB_SIZE - 1
NUM_MODULES = 3
DRAFT_VOCAB_SIZE = 100
_STRIDE = 2
"""The draft's token i is the target's token 2 * i + 1."""


def write_head(
    path: Path,
    *,
    layout: str = AUTHORS,
    seed: int = 0,
    has_embedding: bool = True,
    has_tokenizer: bool = True,
    draft_vocab_size: int = DRAFT_VOCAB_SIZE,
    drop: str | None = None,
    more: str | None = None,
    **changes: Any,
) -> Path:
    """Writes a head for the target of `write_checkpoint`; `changes` go into `config.json`. Returns `path`.

    `drop`, `more`: a tensor that it lacks, or has too many.

    An EAGLE head has a bias and the whole vocabulary, and no embedding and output if `has_embedding` is not set.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", _config(layout, draft_vocab_size) | changes)
    if layout in (BLOCKS, LLAMA_BLOCKS):
        layers = changes.get("dflash_config", _BLOCK_FIELDS)["target_layer_ids"]
        weights = block_weights(layout, seed=seed, num_states=len(layers))
    else:
        weights = head_weights(layout, seed=seed, has_embedding=has_embedding, draft_vocab_size=draft_vocab_size)
    weights |= {} if more is None else {more: torch.zeros(1)}
    write_weights(path, {name: tensor for name, tensor in weights.items() if name != drop})
    if has_tokenizer:
        write_tokenizer(path)
    return path


def head_weights(
    layout: str, *, seed: int, has_embedding: bool = True, draft_vocab_size: int = DRAFT_VOCAB_SIZE
) -> dict[str, torch.Tensor]:
    """The tensors by name."""
    if layout == MODULES:
        return _modules(seed, has_embedding=has_embedding)
    hidden, mlp, vocab = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
    q, kv = (LLAMA[f"num_{kind}_heads"] * LLAMA["head_dim"] for kind in ("attention", "key_value"))
    layer, is_eagle = "midlayer" if layout == AUTHORS else "layers.0", layout == EAGLE_AUTHORS
    read = hidden if is_eagle else 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, (2 if is_eagle else 3) * hidden),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q, read),
        f"{layer}.self_attn.k_proj.weight": (kv, read),
        f"{layer}.self_attn.v_proj.weight": (kv, read),
        f"{layer}.self_attn.o_proj.weight": (hidden, q),
        f"{layer}.mlp.gate_proj.weight": (mlp, hidden),
        f"{layer}.mlp.up_proj.weight": (mlp, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, mlp),
    }
    if is_eagle:
        shapes["fc.bias"] = (hidden,)
    else:
        norms = (f"{layer}.hidden_norm.weight", f"{layer}.input_layernorm.weight", "norm.weight")
        shapes |= dict.fromkeys(norms, (hidden,))
    if has_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if has_embedding or not is_eagle:
        shapes["lm_head.weight"] = (vocab if is_eagle else draft_vocab_size, hidden)
    weights = _random(shapes, seed)
    if is_eagle:
        return weights
    own = torch.arange(draft_vocab_size)
    ids = _STRIDE * own + 1 if draft_vocab_size < vocab // _STRIDE else own
    weights["d2t"] = ids - own
    weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return weights


_BLOCK_FIELDS = {"target_layer_ids": [0], "mask_token_id": MASK_ID}


def block_weights(layout: str, *, seed: int, num_states: int) -> dict[str, torch.Tensor]:
    """The tensors of a block drafter that reads `num_states` of the target's layers."""
    config, hidden = _config(layout, VOCAB_SIZE), LLAMA["hidden_size"]
    weights = random_weights(config, seed=seed, dtype=torch.float32)
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    del weights["embed_tokens.weight"], weights["lm_head.weight"]
    return weights | _random({"fc.weight": (hidden, num_states * hidden), "hidden_norm.weight": (hidden,)}, seed)


def _modules(seed: int, *, has_embedding: bool) -> dict[str, torch.Tensor]:
    hidden, mlp, vocab = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
    q, kv = (LLAMA[f"num_{kind}_heads"] * LLAMA["head_dim"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
        "shared_head.norm.weight": (hidden,),
    }
    shared = {"embed_tokens.weight": (vocab, hidden), "shared_head.head.weight": (vocab, hidden)}
    first = LLAMA["num_hidden_layers"]
    weights = {
        f"model.layers.{first + number}.{name}": tensor
        for number in range(NUM_MODULES)
        for name, tensor in _random(shapes, seed + number).items()
    }
    if has_embedding:
        weights |= {f"model.layers.{first}.{name}": tensor for name, tensor in _random(shared, seed).items()}
    return weights


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) * 0.2
        weights[name] = 1 + tensor if "norm" in name else tensor
    return weights


def _config(layout: str, draft_vocab_size: int) -> dict[str, Any]:
    if layout == MODULES:
        return LLAMA | {"num_nextn_predict_layers": NUM_MODULES}
    if layout in (BLOCKS, LLAMA_BLOCKS):
        more = {"block_size": BLOCK_SIZE, "dflash_config": _BLOCK_FIELDS, "layer_types": ["full_attention"] * 2}
        layers = FAMILIES["qwen3"] if layout == BLOCKS else LLAMA
        return layers | more | {"architectures": ["DFlashDraftModel"]}
    layer = LLAMA | {"num_hidden_layers": 1}
    if layout == EAGLE_AUTHORS:
        return layer | {"architectures": ["LlamaForCausalLM"], "bias": True}
    if layout == AUTHORS:
        return layer | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab_size}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
        "draft_vocab_size": draft_vocab_size,
        "norm_before_residual": True,
        "transformer_layer_config": layer,
    }


def make_head(path: Path, target: Path, layout: str = LAYOUTS[0]) -> RoleEngine:
    """A head that sees little of its states and much of the target's own first guess, so that it is right at times.

    A block drafter is as random as the target, and right where the noise is.
    """
    write_head(path, layout=layout, has_embedding=False, has_tokenizer=False, draft_vocab_size=VOCAB_SIZE)
    weights = load_file(path / "model.safetensors") if ALGORITHMS[layout] != DFLASH else {}
    own = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("fc.weight", "eh_proj.weight")):
            hidden, width = weight.shape
            weights[name] = torch.cat((torch.zeros(hidden, width - hidden), torch.eye(hidden)), dim=1)
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.bias")):
            weights[name] *= 0.02
        if name.endswith("shared_head.norm.weight"):
            weights[name] = own["model.norm.weight"].clone()
    if ALGORITHMS[layout] == EAGLE3:
        weights["norm.weight"], weights["lm_head.weight"] = own["model.norm.weight"], own["lm_head.weight"]
    if weights:
        write_weights(path, {name: tensor.contiguous() for name, tensor in weights.items()})
    return make_draft(WorkerConfig(model=path, target=target, algorithm=ALGORITHMS[layout]), HostDevice(), 0)
