"""The noise against its page, `docs/noise.md`: definition, plain Python and test vectors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.services.models.sampler import gumbel_noise, gumbel_noise_of, words_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "noise.md").read_text(encoding="utf-8")
VECTORS = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| 0x(\w{8}) \| (\S+) \| 0x(\w{8}) \|$", PAGE, re.MULTILINE)
UNSIGNED_64 = 2**64


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The functions of the page's Python."""
    functions: dict[str, Any] = {}
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None, "the page has a Python example"
    exec(code[1], functions)
    return functions


def rows(*values: int) -> torch.Tensor:
    """[N] int64 with the bits of unsigned values."""
    return torch.tensor([value - UNSIGNED_64 if value >= UNSIGNED_64 // 2 else value for value in values])


def bits(noise: torch.Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in noise.view(torch.int32).flatten().tolist()]


def test_page_has_vectors_for_every_word_and_both_ends() -> None:
    assert len(VECTORS) >= 16
    assert {int(token_id) & 3 for _, _, token_id, *_ in VECTORS} == {0, 1, 2, 3}
    assert {"00000000", "ffffffff"} <= {word for *_, word, _, _ in VECTORS}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_plain_python_is_philox(
    plain: dict[str, Any], counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Known answers of Random123 (`kat_vectors`)."""
    assert plain["philox"](counter, key) == expected


@pytest.mark.parametrize(("seed", "position", "token_id", "word", "value", "value_bits"), VECTORS)
def test_vector(
    plain: dict[str, Any], seed: str, position: str, token_id: str, word: str, value: str, value_bits: str
) -> None:
    place = (int(seed), int(position), int(token_id))
    assert plain["word"](*place) == int(word, 16)
    assert np.float32(plain["noise"](*place)) == np.float32(value)
    seeds, positions, index = rows(place[0]), rows(place[1]), place[2]
    assert words_of(torch.tensor([[index]]), seeds, positions)[0, 0] == int(word, 16)
    noise = gumbel_noise(seeds, positions, index + 1)
    assert noise.dtype == torch.float32
    assert noise.shape == (1, index + 1)
    assert bits(noise[0, index]) == [int(value_bits, 16)]


@pytest.mark.parametrize("vocab_size", [1, 5, 4096, 4099, 40_000])
def test_a_row_is_the_same_alone_and_among_others(vocab_size: int) -> None:
    print("torch seed 3")
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (11,), generator=generator)
    positions = torch.randint(0, 2**32, (11,), generator=generator)
    together = gumbel_noise(seeds, positions, vocab_size)
    assert together.isfinite().all()
    for row in range(11):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], positions[row : row + 1], vocab_size)[0], together[row])
    few = torch.randint(0, vocab_size, (11, 40), generator=generator)
    assert torch.equal(gumbel_noise_of(few, seeds, positions), together.gather(1, few))
    assert gumbel_noise(seeds[:0], positions[:0], vocab_size).shape == (0, vocab_size)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.arange(200), torch.arange(200) % 7, 5000).to(torch.float64)
    assert noise.mean().item() == pytest.approx(np.euler_gamma, abs=0.006)  # 4.7 standard errors
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.02)
    assert (noise < 0).to(torch.float64).mean().item() == pytest.approx(np.exp(-1), abs=0.0025)
