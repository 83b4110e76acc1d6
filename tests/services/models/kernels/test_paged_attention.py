"""Attention over pages against a plain one in float64: what it must not read or write, the same bits beside any rows
(what `--deterministic` builds on), and the plan of ragged rows: every split of every tile once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.services.models.attention import RaggedRows, TorchAttention
from slipstream.services.models.kernels import paged_attention
from slipstream.services.models.kernels.paged_attention import PagedAttention, RaggedPlan
from tests.services.models.kernels.attention_case import TOLERANCES, AttentionCase, some_config

pytestmark = pytest.mark.sampled_module(10)

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("width", [3, 70])
def test_bounded_scores(width: int, window: int | None, device: torch.device, dtype: torch.dtype) -> None:
    windows = () if window is None else (window,)
    config = some_config(sliding_windows=windows, score_scale=0.4, score_cap=2.0, head_dim=32)
    case = AttentionCase.random(config, (100, 2), width, device=device, dtype=dtype, seed=12, page_size=64)
    case.assert_close(case.attend(), case.expected())
    if dtype == torch.float32:
        case.ragged((width, 1)).assert_as_pytorch()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("width", [1, 20])
def test_scores_without_values(width: int, window: int | None, device: torch.device, dtype: torch.dtype) -> None:
    """Far less, and far more than the keys'; programs that share a row's keys count them once."""
    config = some_config(sliding_windows=() if window is None else (window,))
    case = AttentionCase.random(config, (100, 2), width, device=device, dtype=dtype, seed=13, page_size=64)
    case = replace(case, sinks=torch.tensor([-200.0, 0.0, 3.0, 300.0], device=device))
    case.assert_close(case.attend(), case.expected())
    case.assert_close(case.attend(is_invariant=True), case.expected())
    assert case.attend().view(-1, 4, config.head_dim)[:, 3].abs().max().item() < 1e-30
    if dtype == torch.float32:
        case.ragged((width, 1)).assert_as_pytorch()


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


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("length", [20, 600])
def test_a_key_that_is_not_a_number_is_not_hidden(length: int, cap: float | None, device: torch.device) -> None:
    case = AttentionCase.random(some_config(score_cap=cap), [length], 2, device=device, dtype=torch.float32, seed=10)
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


WIDTH = 5


def attend(case: AttentionCase, qkv: torch.Tensor) -> torch.Tensor:
    """[B, W, q_size]."""
    output = replace(case, qkv=qkv).attend(is_invariant=True)
    return output.view(*case.batch.tokens.shape, -1)


def alone(case: AttentionCase, column: int, *, at: int) -> torch.Tensor:
    """The query of a column where it is the only one of its row, in column `at`: [B, q_size]."""
    num_rows = len(case.batch.tokens)
    is_valid = torch.zeros_like(case.batch.is_valid)
    is_valid[:, at] = True
    positions = case.batch.positions[:, column : column + 1].expand(-1, WIDTH).contiguous()
    qkv = case.qkv.view(num_rows, WIDTH, -1)[:, column : column + 1].expand(-1, WIDTH, -1)
    later = case.change(positions=positions, is_valid=is_valid)
    return attend(later, qkv.reshape(num_rows * WIDTH, -1))[:, at]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("lengths", [(45,), (94, 13), (190,), (125, 126, 127, 128)])
def test_a_query_does_not_depend_on_its_row(
    lengths: Sequence[int], window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Lengths near which keys would be split elsewhere, or a window would begin elsewhere.

    On a GPU a draft's token comes back in the first column, as the bonus token of a step; the products of Triton's
    interpreter give another column other bits.
    """
    config = some_config(sliding_windows=() if window is None else (window,))
    case = AttentionCase.random(config, lengths, WIDTH, device=device, dtype=dtype, seed=4, page_size=16)
    together = attend(case, case.qkv)
    case.assert_close(together.flatten(0, 1), case.expected())
    for column in range(WIDTH):
        for at in {column, 0} if device.type == "cuda" else {column}:
            assert torch.equal(alone(case, column, at=at), together[:, column]), f"column {column}, then {at}"


@pytest.mark.sampled(1)
def test_a_chunk_does_not_depend_on_those_beside_it(device: torch.device, dtype: torch.dtype) -> None:
    """Short ones beside a long one, which a tile of another size would suit."""
    lengths, widths = (45, 0, 94), (3, 70, 11)
    case = AttentionCase.random(some_config(), lengths, 70, device=device, dtype=dtype, seed=6, page_size=16)
    beside = case.ragged(widths)
    together = beside.attend(is_invariant=True).split(widths)
    qkv, batch = case.qkv.view(3, 70, -1), case.batch
    for row, width in enumerate(widths):
        own = {name: getattr(batch, name)[row : row + 1] for name in ("tokens", "positions", "is_valid", "limits")}
        alone = replace(case.change(**own, page_table=batch.page_table[row : row + 1]), qkv=qkv[row])
        assert torch.equal(alone.ragged((width,)).attend(is_invariant=True), together[row])


@pytest.mark.sampled(1)
def test_a_query_does_not_depend_on_the_table(device: torch.device, dtype: torch.dtype) -> None:
    """A page table is longer where more tokens are drafted ahead."""
    cases = [
        AttentionCase.random(some_config(), (90,), WIDTH, device=device, dtype=dtype, seed=5, page_size=16)
        for _ in range(2)
    ]
    longer = torch.cat((cases[1].batch.page_table, cases[1].batch.page_table.new_zeros(1, 40)), dim=1)
    assert torch.equal(attend(cases[0], cases[0].qkv), attend(cases[1].change(page_table=longer), cases[1].qkv))


TILE, CAPACITY = 32, 40_000


def plan_of(
    lengths: list[int],
    contexts: list[int],
    device: torch.device,
    *,
    spare: int,
    padding: int | None = None,
    knows_keys: bool = False,
) -> RaggedPlan:
    """Plans rows of `lengths` behind `contexts`; with `padding` tokens behind them as a graph does."""
    begins = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    positions = torch.cat([torch.arange(length) + start for length, start in zip(lengths, contexts, strict=True)])
    positions = torch.cat((positions, torch.full((padding or 0,), 2**62)))
    ragged = RaggedRows(
        tuple(lengths) if padding is None else None,
        torch.zeros_like(positions).to(device),
        begins.to(device),
        tuple(length + start for length, start in zip(lengths, contexts, strict=True)) if knows_keys else None,
    )
    limits = torch.full((len(lengths),), CAPACITY, device=device)
    return RaggedPlan.of(ragged, positions.to(device), limits, capacity=CAPACITY, tokens=TILE, spare=spare)


def tiles_of(lengths: list[int]) -> Counter[tuple[int, int]]:
    """The first tokens of all tiles, and their rows."""
    begins = [sum(lengths[:row]) for row in range(len(lengths))]
    return Counter((begins[row] + place, row) for row, length in enumerate(lengths) for place in range(0, length, TILE))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(20))
def test_random_rows(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    num_rows = draw(1, 300) if seed % 4 == 0 else draw(1, 12)
    longest = (2, 9, 200)[draw(0, 3)]
    lengths = [draw(0, longest) for _ in range(num_rows)]
    contexts = [draw(0, (10, 3000, 32_000)[draw(0, 3)]) for _ in range(num_rows)]
    spare, padding = draw(1, 70), (None, draw(0, 99))[draw(0, 2)]
    plan = plan_of(lengths, contexts, device, spare=spare, padding=padding)
    num_tokens = sum(lengths) + (padding or 0)
    items = [item for item in zip(*plan.items.tolist(), strict=True) if item[0] < num_tokens]
    splits = {(begin, row): num_splits for begin, row, _, num_splits, _ in items}
    assert Counter((begin, row, split) for begin, row, split, _, _ in items) == Counter(
        (*tile, split) for tile, count in splits.items() for split in range(count)
    ), "each split once"
    assert Counter(splits.keys()) == tiles_of(lengths), "each tile"

    ends = {row: sum(lengths[: row + 1]) for row in range(num_rows)}
    several = {tile: count for tile, count in splits.items() if count > 1}
    listed = [tile for tile in zip(*plan.split_tiles.tolist(), strict=True) if tile[2]]
    places = {(begin, split): place for begin, _, split, count, place in items if count > 1}
    assert sorted(tile[:3] for tile in listed) == sorted((begin, ends[row], n) for (begin, row), n in several.items())
    assert all(places[begin, split] == first + split for begin, _, count, first in listed for split in range(count))
    assert len(set(places.values())) == len(places) == sum(several.values())
    assert all(0 <= place < plan.num_places for place in places.values())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(20))
def test_where_the_host_knows_that_none_is_shared_there_is_no_room_for_it(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 300, (8,), generator=generator).tolist()
    contexts = torch.randint(0, (10, 300, 9000)[seed % 3], (8,), generator=generator).tolist()
    plan, informed = (plan_of(lengths, contexts, device, spare=20, knows_keys=knows) for knows in (False, True))
    if plan.split_tiles[2].any():
        assert torch.equal(informed.items, plan.items)
        assert torch.equal(informed.split_tiles[2], plan.split_tiles[2])
    else:
        assert torch.equal(informed.items, plan.items[:, :-20])
        assert informed.num_places == 0


def test_long_rows_are_shared_by_as_many_programs_as_are_spare(device: torch.device) -> None:
    """One token behind a long context, alone, beside a shorter one, and beside a crowd."""
    assert plan_of([1], [32_000], device, spare=33).split_tiles[2].tolist() == [33] + [0] * 32
    both = plan_of([5, 5], [20_000, 10_000], device, spare=30).split_tiles[2].tolist()
    assert both[:3] == [20, 10, 0]
    assert not plan_of([1] * 64, [1000] * 64, device, spare=33).split_tiles[2].any()


def test_without_spare_programs_nothing_is_shared(device: torch.device) -> None:
    plan = plan_of([1, 100], [32_000, 9000], device, spare=0)
    assert plan.items[3].tolist() == [1] * 5
    assert plan.num_places == 0
