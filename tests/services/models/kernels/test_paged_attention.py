"""Attention over pages against a plain one in float64, and what it must not read or write."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.services.models.attention import TorchAttention
from slipstream.services.models.kernels import paged_attention
from slipstream.services.models.kernels.paged_attention import PagedAttention, RaggedPlan
from tests.services.models.kernels.attention_case import TOLERANCES, AttentionCase, some_config

FAR = 2**62


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "lengths", "width"),
    [
        (4, 2, 16, (13, 0, 47), 5),
        (4, 1, 32, (200,), 1),
        (2, 2, 24, (31, 5), 3),
        (6, 2, 16, (9, 0), 11),
        (8, 2, 64, (150,), 5),
    ],
)
def test_chain(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    lengths: tuple[int, ...],
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    config = some_config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    case = AttentionCase.random(config, lengths, width, device=device, dtype=dtype, seed=1)
    case.assert_close(case.attend(), case.expected())


@pytest.mark.sampled(1)
def test_prompts(device: torch.device, dtype: torch.dtype) -> None:
    """More queries than one program takes, and padding at the end of the shorter prompt."""
    case = AttentionCase.random(some_config(), (0, 37), 90, device=device, dtype=dtype, seed=2, page_size=16)
    is_valid = case.batch.is_valid.clone()
    is_valid[1, 20:] = False
    case = case.change(is_valid=is_valid)
    case.assert_close(case.attend(), case.expected())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [3, 70])
def test_sliding_windows(width: int, device: torch.device, dtype: torch.dtype) -> None:
    config = some_config(num_layers=3, sliding_windows=(7, None, 40))
    case = AttentionCase.random(config, (100, 2), width, device=device, dtype=dtype, seed=3)
    for layer in range(3):
        case.assert_close(case.attend(layer), case.expected(layer))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("width", [3, 90])
def test_keys_before_a_rows_first_position_are_not_read(
    width: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    config = some_config(sliding_windows=() if window is None else (window,))
    lengths = (100, 0, 37, 64)
    case = AttentionCase.random(config, lengths, width, device=device, dtype=dtype, seed=9, page_size=16)
    case = case.change(starts=torch.tensor([71, 0, 37, -FAR], device=device))
    for row, start in enumerate((71, 0, 37)):
        place = torch.arange(start)
        at = case.batch.page_table[row].cpu()[place // 16] * 16 + place % 16
        case.cache.rows[0][at.to(device)] = float("nan")
    output = case.attend()
    case.assert_close(output, case.expected())
    from_0 = case.change(starts=torch.tensor([71, 0, 37, 0], device=device))
    assert torch.equal(from_0.attend(), output)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(12))
def test_random_batches_as_pytorch_has_them(seed: int, device: torch.device) -> None:
    """Limits, windows, invalid queries, wild positions and page numbers: the same output and the same pages."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    windows = (None, draw(1, 30))[draw(0, 2)]
    config = some_config(sliding_windows=() if windows is None else (windows,), num_heads=(2, 4, 6)[draw(0, 3)])
    lengths = [draw(0, 60) for _ in range(draw(1, 5))]
    case = AttentionCase.random(
        config, lengths, draw(1, 9), device=device, dtype=torch.float32, seed=seed, page_size=draw(1, 9)
    )
    batch = case.batch
    is_valid = torch.rand(batch.tokens.shape, generator=generator).to(device) < 0.8
    last = batch.positions[:, -1]
    limits = torch.where(torch.rand(len(lengths), generator=generator).to(device) < 0.5, last - 1, last + 3)
    wild = torch.tensor([FAR, -FAR, -1, 3])[torch.randint(0, 4, batch.tokens.shape, generator=generator)].to(device)
    page_table = batch.page_table.clone()
    page_table[:, -1] = torch.tensor([FAR, -FAR, -1])[torch.randint(0, 3, (len(lengths),), generator=generator)]
    case = case.change(
        is_valid=is_valid,
        limits=limits.clamp_min(1),
        positions=torch.where(is_valid, batch.positions, wild),
        page_table=page_table,
    )
    if draw(0, 2):
        case = case.change(starts=torch.tensor([draw(-2, length + 1) for length in lengths], device=device))
    case.assert_as_pytorch()
    case.ragged([draw(1, batch.tokens.shape[1] + 1) for _ in lengths]).assert_as_pytorch()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_ragged_rows_as_pytorch_has_them(window: int | None, has_starts: bool, device: torch.device) -> None:
    """One token beside a long chunk, some past their limit, some not valid."""
    config = some_config(sliding_windows=() if window is None else (window,))
    lengths, widths = (100, 0, 37, 0, 64), (1, 300, 17, 33, 6)
    case = AttentionCase.random(config, lengths, 300, device=device, dtype=torch.float32, seed=10, page_size=16)
    is_valid = torch.rand(case.batch.tokens.shape, generator=torch.Generator().manual_seed(11)).to(device) < 0.9
    limits = case.batch.limits.clone()
    limits[2], limits[4] = 45, 60
    case = case.change(is_valid=is_valid, limits=limits)
    if has_starts:
        case = case.change(starts=torch.tensor([71, 0, 37, -FAR, 63], device=device))
    case.ragged(widths).assert_as_pytorch()


@pytest.mark.parametrize("num_tokens", [58, 70])
def test_ragged_rows_of_a_graph(num_tokens: int, device: torch.device) -> None:
    """Rows without tokens, tiles without queries, and padding of NaN behind the last row change nothing."""
    case = AttentionCase.random(
        some_config(), (100, 0, 37), 40, device=device, dtype=torch.float32, seed=13, page_size=16
    ).ragged((1, 40, 17))
    case.cache.rows[0].nan_to_num_(nan=0.25)
    expected, pages = case.attend(), case.kept_pages()
    graphed = case.as_in_a_graph(5, num_tokens)
    reference = TorchAttention(case.config, graphed.batch, case.cache)(0, graphed.qkv.nan_to_num(nan=1.0))
    for output in (graphed.attend(), reference):
        torch.testing.assert_close(output[:58], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(case.kept_pages(), pages)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_programs_share_the_keys_of_ragged_rows(
    window: int | None, has_starts: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding rows with long contexts beside chunks; of a window most splits have little to read."""
    monkeypatch.setattr(paged_attention, "num_multiprocessors", lambda _: 10)
    config = some_config(num_heads=2, num_kv_heads=1, sliding_windows=() if window is None else (window,))
    widths = (3, 1, 40, 2, 0)
    case = AttentionCase.random(
        config, (2600, 20, 700, 900, 5), 40, device=device, dtype=torch.float32, seed=15, page_size=16
    )
    is_valid = torch.rand(case.batch.tokens.shape, generator=torch.Generator().manual_seed(16)).to(device) < 0.9
    case = case.change(is_valid=is_valid)
    if has_starts:
        case = case.change(starts=torch.tensor([1100, 0, 37, -FAR, 0], device=device))
    ragged = case.ragged(widths)
    batch = ragged.batch
    assert batch.ragged is not None
    plan = RaggedPlan.of(batch.ragged, batch.positions, batch.limits, capacity=2640, tokens=32, spare=20)
    assert plan.items[3].max() > 8, "more splits than are combined at once"
    ragged.assert_as_pytorch()
    expected, graphed = ragged.attend(), ragged.as_in_a_graph(6, 50)
    torch.testing.assert_close(graphed.attend()[: sum(widths)], expected, atol=1e-5, rtol=0)


def test_ragged_rows_of_any_length_share_a_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens may come in a step that no graph takes: their kernel must not be compiled while requests wait."""
    case = AttentionCase.random(some_config(), (3, 0), 90, device=device, dtype=torch.float32, seed=14)
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(
        paged_attention, "attend_kernel", defaultdict(lambda: lambda *_, **flags: launched.append(flags))
    )
    for widths in ((1, 1), (2, 90)):
        case.ragged(widths).attend()
    assert launched[0] == launched[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_large_tiles", [False, True])
def test_short_ragged_rows(
    has_large_tiles: bool, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries in a tile, and many keys; heads that do not fill it evenly, many of one token, and of usual size."""
    if has_large_tiles:
        monkeypatch.setattr(paged_attention, "_LONG_TOKENS", 0)
        monkeypatch.setattr(paged_attention, "_LONG_ROW", 0)
    for num_heads, num_kv_heads, head_dim in ((4, 2, 16), (6, 2, 16), (72, 1, 16), (4, 1, 128)):
        config = some_config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        case = AttentionCase.random(config, (900, 0, 9), 5, device=device, dtype=dtype, seed=12)
        widths = (2, 1, 5)
        output, expected = case.ragged(widths).attend(), case.expected()
        at = 0
        for row, width in enumerate(widths):
            difference = (output[at : at + width].to(torch.float64).cpu() - expected[row, :width]).abs()
            assert difference.max() <= TOLERANCES[dtype]
            at += width


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("page_size", "head_dim", "num_multiprocessors"), [(64, 16, 10), (128, 64, 1)])
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("window", [None, 90])
def test_keys_that_are_read_in_blocks(
    page_size: int,
    head_dim: int,
    num_multiprocessors: int,
    window: int | None,
    has_starts: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With pages of a block and of two, rows whose keys programs share, and keys of NaN that no query sees."""
    monkeypatch.setattr(paged_attention, "num_multiprocessors", lambda _: num_multiprocessors)
    windows = () if window is None else (window,)
    config = some_config(num_heads=2, num_kv_heads=1, head_dim=head_dim, sliding_windows=windows)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    lengths, widths = (700, 0, 63, 64, 37), (3, 80, 40, 1, 30)
    case = AttentionCase.random(config, lengths, 80, device=device, dtype=dtype, seed=17, page_size=page_size)
    assert paged_attention._has_blocks(case.cache, head_dim)
    case.cache.rows[0][:, config.kv_size :].nan_to_num_(nan=100.0)
    if has_starts:
        case = case.change(starts=torch.tensor([500, 0, 37, -FAR, 20], device=device))
    ragged = case.ragged(widths)
    outputs = ragged.attend(), ragged.as_in_a_graph(6, sum(widths) + 4).attend()[: sum(widths)]
    expected, is_taken = case.expected(), torch.arange(80) < torch.tensor(widths)[:, None]
    for output in outputs:
        assert (output.to(torch.float64).cpu() - expected[is_taken]).abs().max() <= TOLERANCES[dtype]


@pytest.mark.parametrize("head_dim", [2, 4, 8])
def test_heads_of_few_dimensions_are_not_read_in_blocks(head_dim: int, device: torch.device) -> None:
    """With pages that have whole blocks of wider heads."""
    config, dtype = some_config(head_dim=head_dim), torch.bfloat16 if device.type == "cuda" else torch.float16
    case = AttentionCase.random(config, (70, 3), 5, device=device, dtype=dtype, seed=18, page_size=64)
    case.assert_close(case.attend(), case.expected())
    output, expected = case.ragged((5, 2)).attend(), case.expected()
    expected = torch.cat((expected[0], expected[1, :2]))
    assert (output.to(torch.float64).cpu() - expected).abs().max() <= TOLERANCES[dtype]


def test_ragged_rows_may_have_more_items_than_a_grid_has_rows(device: torch.device) -> None:
    """CUDA's second and third dimension have 65,535 programs, its first has 2^31 - 1."""
    case = AttentionCase.random(some_config(), (0,), 1, device=device, dtype=torch.float32, seed=19)
    attention = PagedAttention(case.config, case.ragged([1]).batch, case.cache)
    assert attention._programs.grid[1:] == ()
    assert attention._programs.grid[0] % case.config.num_kv_heads == 0
    rows = 2**16
    wide = replace(
        case.batch,
        **{
            name: getattr(case.batch, name).expand(rows, -1)
            for name in ("tokens", "positions", "is_valid", "page_table")
        },
        limits=case.batch.limits.expand(rows),
    )
    with pytest.raises(AssertionError, match="65536 rows of 1 tokens: a GPU has 65535 programs there"):
        PagedAttention(case.config, wide, case.cache)


def test_positions_past_the_limit_go_to_the_padding_page(device: torch.device) -> None:
    case = AttentionCase.random(some_config(), (10,), 5, device=device, dtype=torch.float32, seed=6)
    before = case.kept_pages()
    case = case.change(limits=torch.tensor([12], device=device))
    output = case.attend()
    case.assert_close(output, case.expected())
    is_new = (case.kept_pages().isfinite() & ~before.isfinite()).any(dim=-1).any(dim=-1).any(dim=-1)
    assert is_new.sum() == 2


def test_rows_without_a_valid_query_are_left_alone(device: torch.device) -> None:
    case = AttentionCase.random(some_config(), (10, 20), 5, device=device, dtype=torch.float32, seed=7)
    is_valid = case.batch.is_valid.clone()
    is_valid[1] = False
    page_table = case.batch.page_table.clone()
    page_table[1] = FAR
    case = case.change(is_valid=is_valid, page_table=page_table)
    before = case.kept_pages()
    output = case.attend()
    assert (output.view(2, -1)[1] == 0).all()
    case.assert_close(output, case.expected())
    changed = (case.kept_pages().nan_to_num(nan=9.0) != before.nan_to_num(nan=9.0)).any(dim=-1).any(dim=-1).any(dim=-1)
    own = case.batch.page_table[0].cpu() - 1
    assert set(changed.any(dim=1).nonzero().flatten().tolist()) <= set(own.tolist())


# Triton's interpreter takes infinities for errors.
@pytest.mark.parametrize("bad", ["nan", *(["inf", "-inf"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(("length", "width"), [(3, 5), (0, 40), (600, 3)])
def test_a_token_that_is_not_finite_breaks_those_behind_it_alone(
    length: int, width: int, bad: str, device: torch.device
) -> None:
    """A token of a decoding row, whose keys several programs share where they are many, and one of a prompt's chunk."""
    case = AttentionCase.random(some_config(), [length], width, device=device, dtype=torch.float32, seed=9)
    clean, broken = case.attend(), width // 2
    qkv = case.qkv.clone()
    first_value = case.config.q_size + case.config.kv_size
    qkv[broken, first_value + 1] = float(bad)
    half = case.config.q_size // 2  # heads of the first key head
    for batch in (case.batch, case.ragged([width]).batch):
        output = AttentionCase(case.config, case.cache, batch, qkv).attend()
        torch.testing.assert_close(output[:broken], clean[:broken])
        assert output[broken:, :half].isnan().all()
        torch.testing.assert_close(output[broken:, half:], clean[broken:, half:])


@pytest.mark.parametrize("length", [20, 600])
def test_a_key_that_is_not_a_number_is_not_hidden(length: int, device: torch.device) -> None:
    case = AttentionCase.random(some_config(), [length], 2, device=device, dtype=torch.float32, seed=10)
    page_size = case.cache.page_size
    place = case.batch.page_table[0, 7 // page_size] * page_size + 7 % page_size
    case.cache.rows[0][place, : case.config.kv_size] = float("nan")
    assert case.attend().isnan().all()
    assert case.ragged([2]).attend().isnan().all()


def test_a_batch_may_be_empty(device: torch.device) -> None:
    case = AttentionCase.random(some_config(), (10,), 5, device=device, dtype=torch.float32, seed=8)
    names = ("tokens", "positions", "is_valid", "page_table", "limits")
    empty = replace(case.change(**{name: getattr(case.batch, name)[:0] for name in names}), qkv=case.qkv[:0])
    assert empty.attend().shape == (0, case.config.q_size)
