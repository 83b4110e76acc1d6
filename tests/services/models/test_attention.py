"""Paged attention on the CPU: isolation of rows, of padding and of whatever lies past a limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from slipstream.services.models.attention import RaggedRows, TorchAttention
from slipstream.services.models.paged_kv import PADDING_PAGE, PagedKV
from tests.harness.paged_model import CAPACITY_TOKENS, CPU, PAGE_SIZE, PAGES_PER_ROW, PagedModel, random_tokens

FAR = 2**62


def pages_but_padding(cache: PagedKV) -> torch.Tensor:
    return torch.stack(cache.rows)[:, PAGE_SIZE * (PADDING_PAGE + 1) :].clone()


def test_cache_has_a_row_of_keys_and_values_for_each_token(model: PagedModel) -> None:
    config = model.decoder.config
    cache = PagedKV(config, num_pages=5, page_size=8, device=CPU, dtype=torch.bfloat16)
    assert [rows.shape for rows in cache.rows] == [(5 * 8, 2 * 2 * 16)] * config.num_layers
    assert sum(rows.nbytes for rows in cache.rows) == 5 * 8 * config.kv_bytes_per_token(torch.bfloat16)
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("seed", range(3))
def test_order_of_pages_changes_nothing(checkpoint: Path, seed: int) -> None:
    prompt = random_tokens(30, seed=1)
    sorted_pages, shuffled = PagedModel(checkpoint), PagedModel(checkpoint, seed=seed)
    sorted_pages.page_table = sorted_pages.page_table.flatten().sort()[0].view_as(sorted_pages.page_table)
    expected = sorted_pages.run(sorted_pages.batch([(0, prompt)]))
    assert torch.equal(shuffled.run(shuffled.batch([(0, prompt)])), expected)


def test_a_row_is_the_same_alone_and_in_a_batch(model: PagedModel) -> None:
    prompts = [random_tokens(length, seed=length) for length in (3, 30, 11)]
    together = model.run(model.batch([(0, prompt) for prompt in prompts]))
    for row, prompt in enumerate(prompts):
        alone = model.run(model.batch([(0, prompt)]))
        torch.testing.assert_close(together[row, : len(prompt)], alone[0], atol=1e-5, rtol=1e-5)


def test_ragged_rows_are_the_same_as_padded_ones(model: PagedModel) -> None:
    """Chunks of different lengths at different places, one behind the other."""
    earlier, rows = [(0, random_tokens(length, seed=length)) for length in (9, 30, 4)], []
    for start, length in ((9, 1), (30, 12), (4, 5)):
        rows.append((start, random_tokens(length, seed=start)))
    model.run(model.batch(earlier))
    padded = model.batch(rows)
    expected = model.run(padded)
    kept = pages_but_padding(model.cache)
    begins = [0, *accumulate(len(tokens) for _, tokens in rows)]
    flat = replace(
        padded,
        **{name: getattr(padded, name)[padded.is_valid] for name in ("tokens", "positions", "is_valid")},
        ragged=RaggedRows((1, 12, 5), padded.is_valid.nonzero()[:, 0], torch.tensor(begins)),
    )
    for layer in model.cache.rows:
        layer.zero_()
    model.run(model.batch(earlier))
    for bound in (None, 42):
        logits = model.run(replace(flat, max_kv_len=bound))
        torch.testing.assert_close(logits, expected[padded.is_valid], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pages_but_padding(model.cache), kept, atol=1e-5, rtol=1e-5)


def test_padding_queries_and_rows_do_not_disturb(model: PagedModel) -> None:
    rows = [(0, random_tokens(9, seed=1)), (0, random_tokens(4, seed=2)), (0, [5])]
    batch = model.batch(rows)
    batch.is_valid[2] = False
    expected, kept = model.run(batch), pages_but_padding(model.cache)
    disturbed = replace(
        batch,
        tokens=torch.where(batch.is_valid, batch.tokens, -FAR),
        positions=torch.where(batch.is_valid, batch.positions, torch.tensor([FAR, -FAR, 3] * 3)),
    )
    disturbed.page_table[2] = torch.tensor([2**40, -7, FAR])[torch.arange(PAGES_PER_ROW) % 3]
    logits = model.run(disturbed)
    assert torch.equal(logits[batch.is_valid], expected[batch.is_valid])
    assert torch.equal(pages_but_padding(model.cache), kept)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_padding_page_and_the_pages_of_others_are_not_read(model: PagedModel, value: float) -> None:
    rows = [(0, random_tokens(9, seed=1)), (0, random_tokens(6, seed=2))]
    expected = model.run(model.batch(rows))
    for layer in model.cache.rows:
        layer.fill_(value)
    table = torch.cat((model.page_table[:2, :3], torch.zeros(2, 5, dtype=torch.int64)), dim=1)
    batch = model.batch(rows, page_table=table)
    logits = model.run(batch)
    torch.testing.assert_close(logits[batch.is_valid], expected[batch.is_valid], atol=1e-5, rtol=1e-5)


def test_positions_past_the_limit_are_dropped(model: PagedModel) -> None:
    prompt = random_tokens(12, seed=3)
    expected = model.run(model.batch([(0, prompt)]))[0]
    for layer in model.cache.rows:
        layer.fill_(float("nan"))
    logits = model.run(model.batch([(0, prompt)], limits=torch.tensor([7])))[0]
    torch.testing.assert_close(logits[:7], expected[:7], atol=1e-5, rtol=1e-5)
    assert logits.isfinite().all(), "queries past the limit see what is before it"
    positions = [(position // PAGE_SIZE, position % PAGE_SIZE) for position in range(12)]
    is_kept = [
        bool(model.cache.rows[0][model.page_table[0, page] * PAGE_SIZE + offset].isfinite().all())
        for page, offset in positions
    ]
    assert is_kept == [True] * 7 + [False] * 5


@pytest.mark.parametrize("start", [-3, CAPACITY_TOKENS - 2, CAPACITY_TOKENS, 511, 512, FAR, -FAR])
@pytest.mark.parametrize("limit", [-FAR, 0, CAPACITY_TOKENS, FAR])
def test_nothing_indexes_out_of_range(model: PagedModel, start: int, limit: int) -> None:
    model.run(model.batch([(0, random_tokens(20, seed=1)), (0, random_tokens(8, seed=2))]))
    kept = pages_but_padding(model.cache)
    own = torch.cat([model.page_table[0] * PAGE_SIZE + offset for offset in range(PAGE_SIZE)]) - PAGE_SIZE
    batch = model.batch([(start, [1, 2, 3])], limits=torch.tensor([limit]))
    assert model.run(batch).isfinite().all()
    changed = (pages_but_padding(model.cache) != kept).any(dim=2).any(dim=0).nonzero()[:, 0]
    assert set(changed.tolist()) <= set(own.tolist()), "only pages of the row itself may change"
    num_kept = sum(0 <= start + index < min(limit, CAPACITY_TOKENS) for index in range(3))
    assert len(changed) == num_kept


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("column", ["query", "key", "value"])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (6, None), (6, 4.0)])
def test_a_token_that_is_not_finite_reaches_only_those_that_see_it(
    model: PagedModel, bad: float, column: str, window: int | None, cap: float | None
) -> None:
    """Its second head only, also where numbers overflow in a score. All others keep their bits, and what is kept."""
    config, width, broken = replace(model.decoder.config, sliding_windows=(window,) * 2, score_cap=cap), 20, 9
    batch = model.batch([(0, random_tokens(width, seed=1)), (0, random_tokens(7, seed=2))])
    clean = torch.randn(2 * width, config.q_size + 2 * config.kv_size, generator=torch.Generator().manual_seed(3))
    clean[:, : config.q_size + config.kv_size] *= 1e10 if bad == 1e30 else 1.0
    qkv, head = clean.clone(), config.head_dim
    place = {"query": 3 * head, "key": config.q_size + head, "value": config.q_size + config.kv_size + head}[column]
    qkv[broken, place + 2] = bad
    outputs = [TorchAttention(config, batch, model.cache)(0, given).view(2, width, -1) for given in (clean, qkv)]
    expected, output = outputs
    sees = (torch.arange(width) == broken) if column == "query" else (torch.arange(width) >= broken)
    if window is not None:
        sees &= torch.arange(width) < broken + window
    is_nan = torch.zeros(2, width, config.num_heads, dtype=torch.bool)
    is_nan[0, sees, 3 if column == "query" else 2 :] = bad != 1e30 or column != "value"
    assert torch.equal(output.isnan().view(2, width, config.num_heads, head).all(dim=3), is_nan)
    is_same = ~is_nan if column != "value" else ~is_nan & ~(sees & (torch.arange(2) == 0)[:, None])[:, :, None]
    of_head = is_same[..., None].expand(-1, -1, -1, head).reshape(output.shape)
    assert torch.equal(output[of_head], expected[of_head])


def test_a_token_that_is_not_finite_leaves_the_pages_before_it_as_they_are(model: PagedModel) -> None:
    """Of all layers: other requests find them by the beginning of their prompts."""
    tokens, page = random_tokens(3 * PAGE_SIZE, seed=1), slice(PAGE_SIZE)
    bad = next(token for token in range(272) if token not in tokens)
    tokens[-2] = bad
    expected = model.run(model.batch([(0, tokens)]))[0]
    begun = [rows.view(-1, PAGE_SIZE, rows.shape[1])[model.page_table[0, :2]].clone() for rows in model.cache.rows]
    model.decoder.embedding.data[bad] = float("nan")
    logits = model.run(model.batch([(0, tokens)]))[0]
    assert logits[-2:].isnan().all()
    assert torch.equal(logits[:-2], expected[:-2])
    for rows, before in zip(model.cache.rows, begun, strict=True):
        assert torch.equal(rows.view(-1, PAGE_SIZE, rows.shape[1])[model.page_table[0, :2]][:, page], before)


@pytest.mark.parametrize("start", [1, PAGE_SIZE, 9])
def test_keys_before_a_rows_first_position_are_not_seen(model: PagedModel, start: int) -> None:
    """Attention knows distances alone: the same tokens from position 0 on have the same logits."""
    whole, tokens = random_tokens(11, seed=1), random_tokens(7, seed=2)
    expected = model.run(model.batch([(0, whole), (0, tokens)]))
    for layer in model.cache.rows:
        layer.fill_(float("nan"))
    starts = torch.tensor([0, start])
    logits = model.run(model.batch([(0, whole), (start, tokens[:5])], starts=starts))
    torch.testing.assert_close(logits[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[1, :5], expected[1, :5], atol=1e-5, rtol=1e-5)
    more = model.run(model.batch([(start + 5, tokens[5:])], first_row=1, starts=starts[1:]))
    torch.testing.assert_close(more[0], expected[1, 5:7], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("start", [-FAR, 3, CAPACITY_TOKENS, FAR])
def test_a_first_position_behind_all_queries_gives_numbers(model: PagedModel, start: int) -> None:
    for layer in model.cache.rows:
        layer.fill_(float("nan"))
    tokens = random_tokens(3, seed=1)
    assert model.run(model.batch([(0, tokens)], starts=torch.tensor([start]))).isfinite().all()


def test_bound_on_lengths_changes_nothing(model: PagedModel) -> None:
    rows = [(0, random_tokens(13, seed=1)), (0, random_tokens(5, seed=2))]
    expected = model.run(model.batch(rows))
    for bound in (13, 14, CAPACITY_TOKENS, 10**9):
        torch.testing.assert_close(model.run(model.batch(rows, max_kv_len=bound))[0], expected[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError, match="max_kv_len = 12"):
        model.run(model.batch(rows, max_kv_len=12))


def test_a_batch_may_be_empty(model: PagedModel) -> None:
    batch = model.batch([(0, [1, 2])])
    names = ("tokens", "positions", "is_valid", "page_table", "limits")
    empty = replace(batch, **{name: getattr(batch, name)[:0] for name in names})
    for bound in (None, 1):
        assert model.run(replace(empty, max_kv_len=bound)).shape == (0, 2, 272)
