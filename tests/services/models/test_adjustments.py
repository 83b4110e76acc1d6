"""Bias, penalties and masks against a naive float64 reference, and inside a chain against the same tokens committed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.wire.sequence import SamplingParams
from slipstream.services.models.adjustments import AdjustmentRows, TokenHistory, adjust
from tests.harness.sampling import examples

CPU = torch.device("cpu")
OFF = SamplingParams()
NUM_SLOTS = 7


@dataclass(frozen=True)
class Row:
    """A request, and what the model was given."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    chain: list[int]


def naive(logits: npt.NDArray[np.float32], row: Row, column: int, width: int, position: int) -> list[float]:
    """The logits of one place, one token after the other."""
    params, adjusted = row.params, [float(value) for value in logits]
    for token, bias in params.logit_bias:
        adjusted[token] += bias
    output = row.output + row.chain[: column + len(row.chain) - width + 1]
    for token, logit in enumerate(adjusted):
        if token in row.prompt or token in output:
            adjusted[token] = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        adjusted[token] -= params.frequency_penalty * output.count(token)
        adjusted[token] -= params.presence_penalty * (token in output)
    if position < params.masked_before:
        for token in params.masked_token_ids:
            adjusted[token] = -np.inf
    return adjusted


def history_of(rows: list[Row], slots: list[int], vocab_size: int, *, commit: int = 0) -> TokenHistory:
    """Adds these prompts and outputs; `commit` of each chain's tokens are output, too."""
    history = TokenHistory(NUM_SLOTS, vocab_size, CPU)
    for row, slot in zip(rows, slots, strict=True):
        at = torch.tensor([slot])
        for token in row.prompt:
            history.add_prompt(at, torch.tensor([[token, 0]]), torch.tensor([[True, False]]))
        output = row.output + row.chain[:commit]
        if output:
            # A token behind the output that does not count.
            history.add_output(at, torch.tensor([[*output, 0]]), torch.tensor([[True] * len(output) + [False]]))
    return history


def run(
    logits: npt.NDArray[np.float32],
    rows: list[Row],
    slots: list[int],
    positions: npt.NDArray[np.int64],
    history: TokenHistory,
    chains: list[list[int]],
) -> npt.NDArray[np.float32]:
    """`adjust` over tables that have each row at its slot."""
    table = AdjustmentRows.off(NUM_SLOTS)
    table.put(torch.tensor(slots), AdjustmentRows.of([row.params for row in rows]))
    given = torch.from_numpy(logits.copy())
    chain = torch.tensor(chains, dtype=torch.int64).view(len(rows), -1)
    adjusted = adjust(given, table, history, torch.tensor(slots), torch.from_numpy(positions), chain)
    np.testing.assert_array_equal(given, logits, "the model's logits stay as they are")
    assert adjusted.dtype == torch.float32
    result: npt.NDArray[np.float32] = adjusted.numpy()
    return result


def params_for(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    """Parameters of all sorts over so many tokens, some of them off."""
    tokens = st.integers(0, vocab_size - 1)
    return st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 2.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.6, -1.1, 2.0]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.9, -2.0]),
        logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=4).map(
            lambda bias: tuple(sorted(bias.items()))
        ),
        masked_before=st.integers(0, 12),
        masked_token_ids=st.sets(tokens, max_size=3).map(lambda ids: tuple(sorted(ids))),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], list[int], int, int]:
    """Rows with chains of the same length, their slots, the size of the vocabulary, and the columns of logits."""
    vocab_size, length = draw(st.integers(2, 9)), draw(st.integers(0, 5))
    tokens = st.integers(0, vocab_size - 1)
    rows = draw(
        st.lists(
            st.builds(
                Row,
                params_for(vocab_size),
                st.lists(tokens, max_size=4),
                st.lists(tokens, max_size=6),
                st.lists(tokens, min_size=length, max_size=length),
            ),
            min_size=1,
            max_size=4,
        )
    )
    slots = draw(st.permutations(range(1, NUM_SLOTS)))[: len(rows)]
    return rows, slots, vocab_size, draw(st.integers(1, length + 1))


@settings(max_examples=examples(300), deadline=None, derandomize=True, database=None)
@given(batches(), st.integers(0, 2**32 - 1))
def test_equals_the_naive_one(batch: tuple[list[Row], list[int], int, int], numpy_seed: int) -> None:
    rows, slots, vocab_size, width = batch
    rng = np.random.default_rng(numpy_seed)
    logits = rng.normal(0, 4, (len(rows), width, vocab_size)).astype(np.float32)
    positions = rng.integers(0, 15, (len(rows), width))
    adjusted = run(logits, rows, slots, positions, history_of(rows, slots, vocab_size), [row.chain for row in rows])
    for number, row in enumerate(rows):
        for column in range(width):
            expected = naive(logits[number, column], row, column, width, int(positions[number, column]))
            np.testing.assert_allclose(adjusted[number, column], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_mask_hides_what_is_not_finite(bad: float) -> None:
    row = Row(SamplingParams(masked_before=5, masked_token_ids=(2, 4)), [], [], [])
    logits = np.array([[[1.0, bad, bad, 0.5, 3.0]]], np.float32)
    for position, expected in ((4, [1.0, bad, -np.inf, 0.5, -np.inf]), (5, [1.0, bad, bad, 0.5, 3.0])):
        adjusted = run(logits, [row], [1], np.array([[position]]), history_of([row], [1], 5), [[]])
        np.testing.assert_array_equal(adjusted[0, 0], np.array(expected, np.float32))


@settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)
@given(batches(), st.integers(0, 2**32 - 1))
def test_a_place_in_a_chain_is_that_behind_the_same_output(
    batch: tuple[list[Row], list[int], int, int], numpy_seed: int
) -> None:
    """Bit for bit, and alone as in a batch: what a draft guessed does not matter to what stands."""
    rows, slots, vocab_size, width = batch
    rng = np.random.default_rng(numpy_seed)
    logits = rng.normal(0, 4, (len(rows), width, vocab_size)).astype(np.float32)
    positions = rng.integers(0, 15, (len(rows), width))
    together = run(logits, rows, slots, positions, history_of(rows, slots, vocab_size), [row.chain for row in rows])
    for number, row in enumerate(rows):
        for column in range(width):
            committed = column + len(row.chain) - width + 1
            history = history_of([row], [slots[number]], vocab_size, commit=committed)
            place = (
                logits[number : number + 1, column : column + 1],
                positions[number : number + 1, column : column + 1],
            )
            alone = run(place[0], [row], [slots[number]], place[1], history, [[]])
            np.testing.assert_array_equal(alone[0, 0], together[number, column])


def test_the_history_of_a_slot_goes_with_its_request() -> None:
    history = TokenHistory(4, 5, CPU)
    history.add_prompt(
        torch.tensor([1, 3]), torch.tensor([[4, 2], [0, 0]]), torch.tensor([[True, True], [True, False]])
    )
    history.add_output(
        torch.tensor([3, 1]),
        torch.tensor([[1, 1, 1], [4, 0, 2]]),
        torch.tensor([[True, True, False], [True, False, False]]),
    )
    history.add_output(torch.tensor([3]), torch.tensor([[1]]), torch.tensor([[True]]))
    so_far = history.take(torch.tensor([1, 2, 3]))
    assert so_far.in_prompt.int().tolist() == [[0, 0, 1, 0, 1], [0] * 5, [1, 0, 0, 0, 0]]
    assert so_far.num_in_output.tolist() == [[0, 0, 0, 0, 1], [0] * 5, [0, 3, 0, 0, 0]]
    history.clear(torch.tensor([3]))
    so_far = history.take(torch.tensor([1, 3]))
    assert so_far.in_prompt.any(dim=1).tolist() == [True, False]
    assert so_far.num_in_output.sum(dim=1).tolist() == [1, 0]


@pytest.mark.parametrize("count", [0, 1, 256])
def test_lists_of_every_length_fit(count: int) -> None:
    ids = tuple(range(1, 2 * count + 1, 2))
    params = replace(OFF, logit_bias=tuple((token, 1.5) for token in ids), masked_before=3, masked_token_ids=ids)
    row = Row(params, [], [], [])
    logits = np.zeros((1, 1, 600), np.float32)
    history = history_of([row], [1], 600)
    behind = run(logits, [row], [1], np.array([[3]]), history, [[]])
    assert behind[0, 0, list(ids)].tolist() == [1.5] * count
    assert behind.sum() == 1.5 * count
    before = run(logits, [row], [1], np.array([[2]]), history, [[]])
    assert np.isneginf(before).sum() == count
    assert np.isneginf(before[0, 0, list(ids)]).all()


def test_nothing_is_read_back_off_the_cpu() -> None:
    """Runs on the meta device, where reading a value is an error."""
    meta = torch.device("meta")
    history = TokenHistory(3, 50, meta)
    rows = torch.zeros(2, dtype=torch.int64, device=meta)
    tokens = torch.zeros((2, 4), dtype=torch.int64, device=meta)
    history.clear(rows)
    history.add_prompt(rows, tokens, tokens.to(torch.bool))
    history.add_output(rows, tokens, tokens.to(torch.bool))
    logits = torch.zeros((2, 5, 50), device=meta)
    positions = torch.zeros((2, 5), dtype=torch.int64, device=meta)
    adjusted = adjust(logits, AdjustmentRows.off(3, device=meta), history, rows, positions, tokens)
    assert adjusted.shape == (2, 5, 50)
