"""Draft heads: their numbers against a plain reference, their layouts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from slipstream.common.errors import CheckpointError
from slipstream.common.wire.step import FINAL_NORM
from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.checkpoint import load_decoder, load_head
from slipstream.services.models.head_config import EAGLE, EAGLE3, MTP, Eagle3Config, EagleConfig, MtpConfig
from slipstream.services.models.heads import DraftHead
from slipstream.services.models.paged_kv import PagedKV
from tests.harness.checkpoints import LLAMA, VOCAB_SIZE, write_checkpoint, write_json, write_weights
from tests.harness.eagle3_checkpoints import (
    ALGORITHMS,
    AUTHORS,
    DRAFT_VOCAB_SIZE,
    EAGLE_AUTHORS,
    LAYOUTS,
    MODULES,
    NUM_MODULES,
    SPECULATORS,
    head_weights,
    write_head,
)

CPU = torch.device("cpu")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
HEADS, KV_HEADS, SIZE = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], LLAMA["head_dim"]
HIDDEN, EPS = LLAMA["hidden_size"], LLAMA["rms_norm_eps"]


def load(path: Path, target: Path | None = None, *, algorithm: str = EAGLE3) -> DraftHead:
    """The head in float32."""
    return load_head(algorithm, path, target=target, device=CPU, dtype=torch.float32)


class Reference:
    """The head as the paper's code has it, without a cache: all entries at once."""

    def __init__(self, layout: str) -> None:
        layer = "midlayer." if layout == AUTHORS else "layers.0."
        weights = head_weights(layout, seed=0)
        self.weights = {name.removeprefix(layer).removesuffix(".weight"): w for name, w in weights.items()}
        self.has_normed_residual = layout == SPECULATORS
        self.is_eagle = layout == EAGLE_AUTHORS

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's states to the head's."""
        return hidden if self.is_eagle else hidden @ self.weights["fc"].T

    def states(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[L] tokens and [L, hidden] states, of the entries 0 .. L-1, to the layer's states."""
        w = self.weights
        embedded = w["embed_tokens"][tokens]
        if self.is_eagle:
            both = residual = torch.cat((embedded, states), dim=-1) @ w["fc"].T + w["fc.bias"]
        else:
            normed = self.norm("hidden_norm", states)
            both = torch.cat((self.norm("input_layernorm", embedded), normed), dim=-1)
            residual = normed if self.has_normed_residual else states
        query, key, value = (
            (both @ w[f"self_attn.{name}_proj"].T).view(len(tokens), -1, SIZE).transpose(0, 1) for name in "qkv"
        )
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (rotate(key), value))
        scores = rotate(query) @ key.transpose(1, 2) / SIZE**0.5
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = residual + mixed @ w["self_attn.o_proj"].T
        y = self.norm("post_attention_layernorm", x)
        return x + (F.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Root mean square norm."""
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[name]

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Over the draft's vocabulary."""
        return (state if self.is_eagle else self.norm("norm", state)) @ self.weights["lm_head"].T


def rotate(x: torch.Tensor) -> torch.Tensor:
    """RoPE over [heads, L, size] at positions 0 .. L-1."""
    theta = LLAMA["rope_parameters"]["rope_theta"]
    frequencies = theta ** -(torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chain_behind_fused_states_is_as_the_reference_has_it(tmp_path: Path, layout: str) -> None:
    head = load(write_head(tmp_path, layout=layout), algorithm=EAGLE if layout == EAGLE_AUTHORS else EAGLE3)
    reference = Reference(layout)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB_SIZE, (9,), generator=generator)
    hidden = torch.randn(6, head.config.hidden_width, generator=generator)
    cache = PagedKV(head.config.layer, num_pages=5, page_size=4, device=CPU, dtype=torch.float32)

    def run(start: int, states: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(start, start + len(states))[None]
        batch = ForwardBatch(
            tokens=tokens[positions],
            positions=positions,
            is_valid=torch.ones_like(positions, dtype=torch.bool),
            page_table=torch.tensor([[3, 1, 4]]),
            limits=torch.tensor([12]),
        )
        return head(batch, states[None], cache)[0]  # type: ignore[no-any-return]

    given = head.fuse(hidden)
    torch.testing.assert_close(given, reference.fuse(hidden))
    own = torch.cat((run(0, given[:2]), run(2, given[2:])))
    for depth in range(3):
        expected = reference.states(tokens[: 6 + depth], given)
        torch.testing.assert_close(own[-1], expected[-1], rtol=1e-4, atol=1e-4)
        logits = head.logits(own[-1])
        torch.testing.assert_close(logits[head.token_ids], reference.logits(own[-1]), rtol=1e-4, atol=1e-4)
        assert logits.isfinite().sum() == head.config.draft_vocab_size
        given = torch.cat((given, own[-1:]))
        own = torch.cat((own, run(6 + depth, own[-1:])))


def test_the_targets_embedding_serves_a_head_without_one(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target")
    path = write_head(tmp_path / "head", has_embedding=False)
    assert torch.equal(load(path, target).embedding, load_embedding(target))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight; it can be the target's"):
        load(path)


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_eagle_head_takes_embedding_and_output_of_the_target(tmp_path: Path, *, is_tied: bool) -> None:
    target = write_checkpoint(tmp_path / "target", tie_word_embeddings=is_tied)
    path = write_head(tmp_path / "head", layout=EAGLE_AUTHORS, has_embedding=False)
    head, theirs = load(path, target, algorithm=EAGLE), load_file(target / "model.safetensors")
    embedding = theirs["model.embed_tokens.weight"].float()
    assert torch.equal(head.embedding, embedding)
    state = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    output = embedding if is_tied else theirs["lm_head.weight"].float()
    torch.testing.assert_close(head.logits(state), state @ output.T, rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match=r"missing tensors: embed_tokens\.weight; it can be the target's"):
        load(path, algorithm=EAGLE)


def test_the_weights_say_whether_an_eagle_head_has_a_bias(tmp_path: Path) -> None:
    """Files of `config.json` are around that say nothing of it, or something else."""
    for bias in ({}, {"bias": None}, {"bias": False}):
        head = load(write_head(tmp_path / "with", layout=EAGLE_AUTHORS, **bias), algorithm=EAGLE)
        assert "steps.0.fc.bias" in dict(head.named_parameters())
    head = load(write_head(tmp_path / "without", layout=EAGLE_AUTHORS, drop="fc.bias"), algorithm=EAGLE)
    assert "steps.0.fc.bias" not in dict(head.named_parameters())


def test_an_eagle_head_reads_what_the_target_norms_last(tmp_path: Path) -> None:
    config = EagleConfig.from_directory(write_head(tmp_path, layout=EAGLE_AUTHORS))
    assert (config.hidden_layers, config.hidden_width) == ((FINAL_NORM,), HIDDEN)


def test_modules_may_lie_in_the_targets_own_checkpoint(tmp_path: Path) -> None:
    apart = write_head(tmp_path / "apart", layout=MODULES, has_embedding=False)
    target = write_checkpoint(tmp_path / "target", num_nextn_predict_layers=NUM_MODULES)
    plain = load_decoder(target, device=CPU, dtype=torch.float32)
    weights, theirs = head_weights(MODULES, seed=0, has_embedding=False), load_file(target / "model.safetensors")
    write_weights(target, theirs | weights)
    decoder = load_decoder(target, device=CPU, dtype=torch.float32)
    assert decoder.config.num_nextn_layers == NUM_MODULES
    assert all(map(torch.equal, decoder.parameters(), plain.parameters()))
    head, other = load(target, target, algorithm=MTP), load(apart, target, algorithm=MTP)
    assert head.config == other.config
    assert all(map(torch.equal, head.parameters(), other.parameters()))
    assert torch.equal(head.embedding, decoder.embedding)
    config = MtpConfig.from_directory(target)
    assert (config.layer.num_layers, config.hidden_layers, config.hidden_width) == (NUM_MODULES, (FINAL_NORM,), HIDDEN)


def test_modules_share_one_embedding_and_one_output(tmp_path: Path) -> None:
    path, first = write_head(tmp_path, layout=MODULES), LLAMA["num_hidden_layers"]
    weights = head_weights(MODULES, seed=0)
    for part in ("embed_tokens.weight", "shared_head.head.weight"):
        own, second = weights[f"model.layers.{first}.{part}"], f"model.layers.{first + 1}.{part}"
        write_weights(path, weights | {second: own.clone()})
        assert torch.equal(load(path, algorithm=MTP).embedding, weights[f"model.layers.{first}.embed_tokens.weight"])
        write_weights(path, weights | {second: own + 1})
        with pytest.raises(CheckpointError, match=f"tensor {second}: it differs from .*supported: modules that share"):
            load(path, algorithm=MTP)
        others = {name: tensor for name, tensor in weights.items() if name != f"model.layers.{first}.{part}"}
        write_weights(path, others | {second: own})
        with pytest.raises(CheckpointError, match=rf"missing tensors: model\.layers\.{first}\.{part}; another module"):
            load(path, algorithm=MTP)


def load_embedding(target: Path) -> torch.Tensor:
    """The target's."""
    return load_decoder(target, device=CPU, dtype=torch.float32).embedding


def test_layers_are_numbered_by_their_inputs(tmp_path: Path) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    assert Eagle3Config.from_directory(write_head(tmp_path)).hidden_layers == ()
    assert Eagle3Config.from_directory(write_head(tmp_path, **{name: [0, 1, 2]})).hidden_layers == (0, 1, 2)
    nested = write_head(tmp_path, eagle_config={name: [0, 1, 2]})
    assert Eagle3Config.from_directory(nested).hidden_layers == (1, 2, 3)


def test_null_is_the_size_of_the_tensors_or_of_the_layer(tmp_path: Path) -> None:
    path = write_head(tmp_path)
    write_json(path / "config.json", raw_config(path) | {"target_hidden_size": None, "draft_vocab_size": None})
    weights = head_weights(AUTHORS, seed=0) | {"fc.weight": torch.zeros(HIDDEN, 3 * 32)}
    write_weights(path, weights)
    config = Eagle3Config.from_directory(path)
    assert (config.target_hidden_size, config.draft_vocab_size) == (32, DRAFT_VOCAB_SIZE)
    (path / "model.safetensors").unlink()
    config = Eagle3Config.from_directory(path)
    assert (config.target_hidden_size, config.draft_vocab_size) == (HIDDEN, VOCAB_SIZE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLM",
        "Eagle3Speculator",
        "LlamaForCausalLMEagle",
    ],
)
def test_tensors_say_what_a_head_is_and_names_do_not(tmp_path: Path, name: str, layout: str) -> None:
    """As does the number of layers: heads are published with that of their target, and with empty lists."""
    algorithm, layers = ALGORITHMS[layout], {"num_hidden_layers": 40, "layer_types": ["full_attention"] * 40}
    expected = load(write_head(tmp_path / "plain", layout=layout), algorithm=algorithm)
    named = write_head(tmp_path / "named", layout=layout, architectures=[name])
    empty: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": []}
    given = raw_config(named) | empty | {"eagle_config": empty}
    if layout == SPECULATORS:
        given["transformer_layer_config"] |= layers
    else:
        given |= layers
    write_json(named / "config.json", given)
    head = load(named, algorithm=algorithm)
    assert head.config == expected.config
    assert all(map(torch.equal, head.parameters(), expected.parameters()))


def test_a_head_of_a_package_may_have_a_flat_config(tmp_path: Path) -> None:
    """The names of its tensors say which layer they are of."""
    write_head(tmp_path)
    write_weights(tmp_path, head_weights(SPECULATORS, seed=0))
    assert Eagle3Config.from_directory(tmp_path).layer_name == "layers.0"
    load(tmp_path)


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    AUTHORS: [
        ({"drop": "fc.weight"}, "missing tensors: fc.weight"),
        ({"drop": "midlayer.input_layernorm.weight"}, "missing tensors: midlayer.input_layernorm.weight"),
        ({"drop": "d2t"}, "missing tensors: d2t"),
        ({"target_hidden_size": 32}, r"tensor fc.weight: got shape \[64, 192\], config.json asks for \[64, 96\]"),
        ({"hidden_size": 128}, "got shape"),
        ({"more": "midlayer.fc_norm.weight"}, "unknown tensors: midlayer.fc_norm.weight; supported: the tensors of an"),
        ({"layout": EAGLE_AUTHORS}, "its tensors are those of algorithm eagle, supported: eagle3"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type: got 'eagle', supported: 'eagle3'"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config: got None"),
        ({"norm_before_fc": True}, "norm_before_fc: got True"),
        ({"draft_vocab_size": 0}, "draft_vocab_size: got 0"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"eagle_aux_hidden_state_layer_ids: got \[1, 2\]"),
        ({"quantization_config": {}, "model_type": "qwen3"}, "model_type: got 'qwen3'"),
        ({"quantization_config": FP8}, "quantization_config: got .*, supported: none, with a draft head"),
    ],
    EAGLE_AUTHORS: [
        ({"drop": "fc.weight"}, "missing tensors: fc.weight"),
        ({"drop": "layers.0.mlp.up_proj.weight"}, "missing tensors: layers.0.mlp.up_proj.weight"),
        (
            {"more": "layers.1.mlp.up_proj.weight"},
            "unknown tensors: layers.1.mlp.up_proj.weight; supported: the tensors",
        ),
        ({"layout": AUTHORS}, "its tensors are those of algorithm eagle3, supported: eagle"),
        ({"intermediate_size": 32}, "got shape"),
    ],
    MODULES: [
        ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers: got None, supported: an integer from 1 to"),
        ({"num_nextn_predict_layers": 4}, r"missing tensors: model\.layers\.5\.enorm\.weight, "),
        ({"num_nextn_predict_layers": 2}, r"unknown tensors: model\.layers\.4\."),
        ({"drop": "model.layers.3.eh_proj.weight"}, r"missing tensors: model\.layers\.3\.eh_proj\.weight;"),
        ({"intermediate_size": 32}, "got shape"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architectures: got"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantization_config: got .* supported: none, with multi-token",
        ),
    ],
}


@pytest.mark.parametrize(
    ("layout", "changes", "message"), [(layout, *case) for layout, cases in REFUSED.items() for case in cases]
)
def test_an_invalid_head_is_refused_in_one_line(
    tmp_path: Path, layout: str, changes: dict[str, Any], message: str
) -> None:
    path = write_head(tmp_path, **{"layout": layout} | changes)
    if changes.get("draft_vocab_size") == 0:
        path = write_head(tmp_path)
        write_json(path / "config.json", raw_config(path) | changes)
    with pytest.raises(CheckpointError, match=message) as error:
        load(path, algorithm=ALGORITHMS[layout])
    assert "\n" not in str(error.value)


def raw_config(path: Path) -> dict[str, Any]:
    """`config.json` as it is."""
    from slipstream.services.models.json_files import read_json

    return read_json(path / "config.json")


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"for a target of hidden size 64, that of .* is 128"):
        load(path, write_checkpoint(tmp_path / "wide", hidden_size=128))


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE + 28])
def test_a_target_whose_vocabulary_is_padded_otherwise_lends_the_rows_that_both_have(
    tmp_path: Path, vocab_size: int
) -> None:
    target = write_checkpoint(tmp_path / "target", vocab_size=vocab_size)
    head = load(write_head(tmp_path / "head", has_embedding=False), target)
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    num_shared = min(vocab_size, VOCAB_SIZE)
    assert torch.equal(head.embedding[:num_shared], theirs[:num_shared])
    assert not head.embedding[num_shared:].any()


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = write_head(tmp_path)
    weights = head_weights(AUTHORS, seed=0)
    for shift, place in ((VOCAB_SIZE, -1), (-1, 1)):
        broken = weights["d2t"].clone()
        broken[place] += shift
        write_weights(path, weights | {"d2t": broken if shift > 0 else -torch.arange(DRAFT_VOCAB_SIZE)})
        with pytest.raises(CheckpointError, match="d2t: some of its ids are not below 272, or there twice"):
            load(path)
