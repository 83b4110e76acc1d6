"""Models that work by kernels against the same models in PyTorch: prompts, then further tokens, over pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.common.wire.step import FINAL_NORM
from slipstream.services.models import decoder
from slipstream.services.models.attention import ForwardBatch, JoinedBatch, RaggedRows
from slipstream.services.models.checkpoint import load_decoder, load_head
from slipstream.services.models.config import ALONE, ModelConfig
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.head_config import DFLASH
from slipstream.services.models.heads import DFlashHead, Eagle3Head, EagleHead
from slipstream.services.models.kernels import products
from slipstream.services.models.kernels.fused import FusedDecoder, make_fused_head
from slipstream.services.models.kernels.paged_attention import paged_attention
from slipstream.services.models.linear import Linear
from slipstream.services.models.paged_kv import PagedKV
from slipstream.services.models.ranks import Ranks
from tests.harness.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.harness.eagle3_checkpoints import ALGORITHMS, BLOCKS, LAYOUTS, LLAMA_BLOCKS, MODULES, write_head
from tests.harness.fp8_checkpoints import quantise
from tests.harness.packed_checkpoints import LAYOUTS as PACKED_LAYOUTS
from tests.harness.packed_checkpoints import keep_packed, pack, pack_experts
from tests.harness.transformers_checkpoints import write_by_transformers

pytestmark = pytest.mark.sampled_module(4)

PAGE_SIZE = 8
NUM_PAGES = 9
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "qwen3-yarn": {"family": "qwen3", "rope_parameters": YARN},
    "llama-fp8": {
        "family": "llama",
        "hidden_size": 128,
        "num_attention_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
    },
    "phi3-partial": {"family": "phi3", "partial_rotary_factor": 0.75, "head_dim": 24, "sliding_window": 5},
}
OTHER_FAMILIES = (
    "gemma2",
    "gemma3",
    "olmo3",
    "smollm3",
    "granite",
    "glm4",
    "ernie4.5",
    "qwen2-moe",
    "dots1",
    "gpt-oss",
)
AUX_LAYERS = (0, 1, 2, FINAL_NORM)
CPU = torch.device("cpu")


def random(shape: tuple[int, ...]) -> torch.Tensor:
    """The same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def write(path: Path, name: str) -> Path:
    """Writes the model's checkpoint."""
    if name in OTHER_FAMILIES:
        return write_by_transformers(path, name, seed=1)
    write_checkpoint(path, seed=1, **MODELS[name])
    if name == "llama-fp8":
        quantise(path, "fp8")
    return path


def batches(device: torch.device) -> list[ForwardBatch]:
    """Two prompts of different lengths, then three tokens behind each, then ragged chunks behind those."""
    tokens = torch.randint(0, VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([11, 6])
    page_table = torch.tensor([[3, 1, 7, 0], [2, 8, 5, 0]])
    made = []
    for starts, widths in ((torch.zeros(2, dtype=torch.int64), lengths), (lengths, torch.tensor([3, 3]))):
        columns = torch.arange(int(widths.max()))
        is_valid = columns < widths[:, None]
        positions = starts[:, None] + torch.minimum(columns, widths[:, None] - 1)
        made.append(
            ForwardBatch(
                tokens=tokens.gather(1, positions).to(device),
                positions=positions.to(device),
                is_valid=is_valid.to(device),
                page_table=page_table.to(device),
                limits=torch.tensor([24, 24], device=device),
            )
        )
    rows, positions = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([14, 15, 16, 17, 9])
    ragged = RaggedRows((4, 1), rows.to(device), torch.tensor([0, 4, 5], device=device))
    flat = {"tokens": tokens[rows, positions], "positions": positions, "is_valid": torch.ones(5, dtype=torch.bool)}
    changes = {name: values.to(device) for name, values in flat.items()}
    return [*made, replace(made[-1], **changes, ragged=ragged)]


def cache_for(config: ModelConfig, device: torch.device) -> PagedKV:
    """Empty pages."""
    return PagedKV(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, device=device, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights could not be taken from one model to the other."""
    monkeypatch.setattr(Linear, "pack", lambda self: None)


# On a GPU tiles of float32 would not fit.
@pytest.fixture(params=["few rows", "many rows", *([] if torch.cuda.is_available() else ["tiles"])])
def products_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways of multiplying, in float32, where numbers tell, and FP8 weights stay what they are."""
    for name in ("_DTYPES", "_TILED_DTYPES"):
        monkeypatch.setattr(products, name, (torch.float32,))
    monkeypatch.setattr(decoder, "keeps_fp8", lambda device, dtype, **_: True)
    if request.param != "few rows":
        for name in ("MOST_ROWS", "MOST_QUANTISED_ROWS"):
            monkeypatch.setattr(products, name, 0)
    monkeypatch.setattr(products, "is_hopper", lambda device: request.param == "tiles")
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 1)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("name", [*MODELS, *OTHER_FAMILIES])
def test_a_fused_decoder_has_the_decoders_numbers(name: str, tmp_path: Path, device: torch.device) -> None:
    path = write(tmp_path, name)
    plain = load_decoder(path, device=CPU, dtype=torch.float32)
    assert type(plain) is Decoder
    fused = FusedDecoder(plain.config, device=device, dtype=torch.float32)
    fused.load_state_dict(plain.state_dict())
    fused.pack()
    caches = cache_for(plain.config, CPU), cache_for(plain.config, device)
    for batch, on_device in zip(batches(CPU), batches(device), strict=True):
        expected = plain.forward(batch, caches[0], aux_layers=AUX_LAYERS)
        output = fused.forward(on_device, caches[1], aux_layers=AUX_LAYERS)
        assert expected.aux is not None
        assert output.aux is not None
        valid = batch.is_valid
        assert_close(output.hidden.cpu()[valid], expected.hidden[valid])
        assert_close(output.aux.cpu()[valid], expected.aux[valid])
        logits = fused.logits(output.hidden).cpu()
        assert_close(logits[valid], plain.logits(expected.hidden)[valid])


class OneRank(Ranks):
    """A rank that has all of a model."""

    def __init__(self) -> None:
        super().__init__(ALONE, None)
        self.num_sums = 0

    def _meet(self, store: Any) -> None:
        assert store is None

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        self.num_sums += 1
        return [part]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("name", ["llama", "qwen2", "llama-fp8"])
def test_a_rank_of_a_fused_decoder_adds_up_each_branch(name: str, tmp_path: Path, device: torch.device) -> None:
    plain = load_decoder(write(tmp_path, name), device=CPU, dtype=torch.float32)
    fused, ranks = FusedDecoder(plain.config, device=device, dtype=torch.float32), OneRank()
    fused.load_state_dict(plain.state_dict())
    fused.pack()
    fused.join(ranks)
    caches, num_layers = (cache_for(plain.config, CPU), cache_for(plain.config, device)), plain.config.num_layers
    for batch, on_device in zip(batches(CPU), batches(device), strict=True):
        expected, valid = plain.forward(batch, caches[0], aux_layers=(1,)), batch.is_valid
        output, ranks.num_sums = fused.forward(on_device, caches[1], aux_layers=(1,)), 0
        assert output.aux is not None
        assert expected.aux is not None
        assert_close(output.aux.cpu()[valid], expected.aux[valid])
        assert_close(fused.logits(output.hidden).cpu()[valid], plain.logits(expected.hidden)[valid])
        assert ranks.num_sums == 1, "of the logits"
        fused.forward(on_device, caches[1])
        assert ranks.num_sums == 1 + 1 + 2 * num_layers, "of the embedding, and of each branch"


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_a_fused_decoder_keeps_packed_weights(
    layout: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, seed=1, **MODELS["llama-fp8"], num_key_value_heads=2, attention_bias=True)
    pack(path, layout, is_left=("layers.0.self_attn.k_proj",))
    plain = load_decoder(path, device=CPU, dtype=torch.float32)
    keep_packed(monkeypatch)
    fused = load_decoder(path, device=device, dtype=torch.float32, decoder_class=FusedDecoder)
    kept = {name.removesuffix(".bits") for name, _ in fused.named_parameters() if name.endswith(".ints.bits")}
    # Weights of several projections have random orders here, each its own, and one projection is left plain.
    names = {"output", "down"} if "order" in layout else {"qkv", "output", "gate_up", "down"}
    expected_names = {f"layers.{layer}.{name}.ints" for layer in range(plain.config.num_layers) for name in names}
    assert kept == (set() if "16" in layout else expected_names - {"layers.0.qkv.ints"})
    caches = cache_for(plain.config, CPU), cache_for(plain.config, device)
    for batch, on_device in zip(batches(CPU), batches(device), strict=True):
        expected = plain.forward(batch, caches[0]).hidden[batch.is_valid]
        assert_close(fused.forward(on_device, caches[1]).hidden.cpu()[batch.is_valid], expected)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize(
    ("family", "layout"), [("gpt-oss", None), ("qwen3-moe", "awq"), ("glm4-moe", "packed-8-bits"), ("mixtral", "gptq")]
)
def test_a_fused_decoder_keeps_packed_experts(
    family: str, layout: str | None, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    sizes |= {} if family in ("gpt-oss", "mixtral") else {"moe_intermediate_size": 128}
    path = write_by_transformers(tmp_path / "it", family, seed=1, **sizes)
    if layout is None:
        pack_experts(path)
    else:
        pack(path, layout)
    plain = load_decoder(path, device=CPU, dtype=torch.float32)
    keep_packed(monkeypatch)
    fused = load_decoder(path, device=device, dtype=torch.float32, decoder_class=FusedDecoder)
    experts = [layer.experts for layer in fused.layers if layer.experts is not None]
    assert experts
    assert all(each.gate_up is None and each.down_ints is not None for each in experts)
    caches = cache_for(plain.config, CPU), cache_for(plain.config, device)
    for batch, on_device in zip(batches(CPU), batches(device), strict=True):
        expected = plain.forward(batch, caches[0]).hidden[batch.is_valid]
        assert_close(fused.forward(on_device, caches[1]).hidden.cpu()[batch.is_valid], expected)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("layout", [*LAYOUTS, MODULES])
def test_a_fused_head_has_the_heads_numbers(layout: str, tmp_path: Path, device: torch.device) -> None:
    path = write_head(tmp_path, layout=layout)
    plain = load_head(ALGORITHMS[layout], path, target=None, device=CPU, dtype=torch.float32)
    assert type(plain) in (Eagle3Head, EagleHead)
    fused = make_fused_head(plain.config, device=device, dtype=torch.float32)
    fused.load_state_dict(plain.state_dict())
    fused.token_ids.copy_(plain.token_ids)
    layer = plain.config.layer
    caches = cache_for(layer, CPU), cache_for(layer, device)
    for batch, on_device in zip(batches(CPU), batches(device), strict=True):
        hidden = random((*batch.tokens.shape, plain.config.hidden_width))
        states = plain.fuse(hidden)
        assert_close(fused.fuse(hidden.to(device)).cpu(), states)
        valid = batch.is_valid
        for module in range(layer.num_layers):
            output = fused(on_device, states.to(device), caches[1], module)
            states = plain(batch, states, caches[0], module)
            assert_close(output.cpu()[valid], states[valid])
            assert_close(fused.own_logits(output).cpu()[valid], plain.logits(states)[valid][:, plain.token_ids])


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("layout", [BLOCKS, LLAMA_BLOCKS])
def test_a_fused_block_drafter_has_the_drafters_numbers(layout: str, tmp_path: Path, device: torch.device) -> None:
    """Blocks of five after six tokens, whose states come with them, after a chunk of a prompt."""
    target = write_checkpoint(tmp_path / "target")
    path = write_head(tmp_path / "head", layout=layout)
    plain = load_head(DFLASH, path, target=target, device=CPU, dtype=torch.float32)
    fused = make_fused_head(plain.config, device=device, dtype=torch.float32)
    fused.load_state_dict(plain.state_dict())
    found, caches = [], []
    for head, place in ((plain, CPU), (fused, device)):
        assert isinstance(head, DFlashHead)
        cache = cache_for(plain.config.layer, place)
        further, ragged = batches(place)[1:]
        hidden = random((5, plain.config.hidden_width)).to(place)
        ragged = replace(ragged, positions=torch.tensor([0, 1, 2, 3, 0], device=place))
        head.keep(ragged, head.fuse(hidden), cache)
        columns, first = torch.arange(6, device=place), torch.tensor([[4], [1]], device=place)
        context = replace(further, positions=first + columns, tokens=columns.expand(2, 6))
        context = replace(context, is_valid=columns < torch.tensor([[6], [2]], device=place))
        positions = first + torch.tensor([[6], [2]], device=place) + columns[:5]
        is_valid = torch.ones_like(positions, dtype=torch.bool)
        block = replace(further, positions=positions, tokens=positions, is_valid=is_valid)
        block = replace(block, last_seen=positions[:, -1:].expand_as(positions))
        states = head.fuse(random((2, 6, plain.config.hidden_width)).to(place))
        output = head.draft(block, context, states, cache)
        found.append((output.cpu(), head.own_logits(output).cpu()))
        caches.append(cache)
    for values, expected in zip(found[1], found[0], strict=True):
        assert_close(values, expected)
    for kept, rows in zip(caches[1].rows, caches[0].rows, strict=True):
        assert_close(kept[PAGE_SIZE:].cpu(), rows[PAGE_SIZE:])


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("outputs", [(), (3, 4, 0, 0)])
def test_of_the_last_layer_some_outputs_are_computed_and_all_keys(
    outputs: tuple[int, ...], is_joined: bool, tmp_path: Path, device: torch.device
) -> None:
    """A joined batch also has all outputs of its first part; both decoders give what a forward of all outputs gives."""
    path = write_checkpoint(tmp_path, seed=1, family="qwen3")
    plain = load_decoder(path, device=CPU, dtype=torch.float32)
    fused = FusedDecoder(plain.config, device=device, dtype=torch.float32)
    fused.load_state_dict(plain.state_dict())
    for model, place in ((plain, CPU), (fused, device)):
        caches = cache_for(plain.config, place), cache_for(plain.config, place)
        prompts, further, ragged = batches(place)
        last = replace(ragged, outputs=torch.tensor(outputs, dtype=torch.int64, device=place))
        for cache, batch in zip(caches, (ragged, last), strict=True):
            model.forward(prompts, cache)
            whole = JoinedBatch.of(further, batch) if is_joined else batch
            output = model.forward(whole, cache, aux_layers=(0, 1))
            if batch is ragged:
                expected = output
        first = further.tokens.numel() if is_joined else 0
        read = [*range(first), *(first + each for each in outputs)]
        assert expected.aux is not None
        assert output.aux is not None
        assert_close(output.aux.cpu(), expected.aux.cpu())
        assert_close(output.hidden.cpu(), expected.hidden.cpu()[read])
        for kept, rows in zip(caches[1].rows, caches[0].rows, strict=True):
            assert_close(kept[PAGE_SIZE:].cpu(), rows[PAGE_SIZE:].cpu())


@pytest.mark.parametrize("most_rows", [3, 5])
def test_the_products_suit_the_outputs_of_the_last_layer(
    most_rows: int, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of few tokens may have many outputs, by padding, and one of many tokens few."""
    monkeypatch.setattr(products, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(products, "MOST_ROWS", most_rows)
    plain = load_decoder(write_checkpoint(tmp_path, seed=1), device=CPU, dtype=torch.float32)
    fused = FusedDecoder(plain.config, device=device, dtype=torch.float32)
    fused.load_state_dict(plain.state_dict())
    of_plain, on_device = batches(CPU)[-1], batches(device)[-1]
    expected = plain.forward(of_plain, cache_for(plain.config, CPU)).hidden
    for outputs in ((4, 3, 0, 1, 2, 2), (4, 1)):
        places = torch.tensor(outputs, device=device)
        output = fused.forward(replace(on_device, outputs=places), cache_for(plain.config, device))
        assert_close(output.hidden.cpu(), expected[list(outputs)])


@pytest.mark.parametrize("is_joined", [False, True])
def test_padding_among_the_outputs_attends_to_nothing(is_joined: bool, tmp_path: Path, device: torch.device) -> None:
    """As many programs as there are outputs would read all keys of a long sequence again."""
    config = load_decoder(write_checkpoint(tmp_path, seed=1), device=CPU, dtype=torch.float32).config
    layer = config.num_layers - 1
    _, further, ragged = batches(device)
    last = replace(ragged, outputs=torch.tensor((3, -1, 4, -1), device=device))
    batch = JoinedBatch.of(further, last) if is_joined else last
    qkv = random((batch.tokens.numel(), config.q_size + 2 * config.kv_size)).to(device)
    rotation = torch.zeros(len(qkv), 2, config.head_dim // 2, device=device)
    output = paged_attention(config, batch, cache_for(config, device), is_invariant=False)(layer, qkv, rotation)
    first = further.tokens.numel() if is_joined else 0
    assert [bool(row.any()) for row in output[first:]] == [True, False, True, False]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("layout", [*LAYOUTS, MODULES])
def test_a_head_may_make_keys_alone(layout: str, tmp_path: Path, device: torch.device) -> None:
    path = write_head(tmp_path, layout=layout)
    plain = load_head(ALGORITHMS[layout], path, target=None, device=CPU, dtype=torch.float32)
    fused = make_fused_head(plain.config, device=device, dtype=torch.float32)
    fused.load_state_dict(plain.state_dict())
    layer = plain.config.layer
    last = layer.num_layers - 1
    for head, place in ((plain, CPU), (fused, device)):
        ragged = batches(place)[-1]
        states = random((len(ragged.tokens), layer.hidden_size)).to(place)
        caches = cache_for(layer, place), cache_for(layer, place)
        head(ragged, states, caches[0], last)
        output = head(replace(ragged, outputs=ragged.positions[:0]), states, caches[1], last)
        assert not len(output)
        assert caches[0].rows[last].any()
        assert_close(caches[1].rows[last].cpu(), caches[0].rows[last].cpu())


def assert_close(values: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares up to the order of sums; TF32 is off by default."""
    torch.testing.assert_close(values, expected, atol=2e-4, rtol=1e-4)
