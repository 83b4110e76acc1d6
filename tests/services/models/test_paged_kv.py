"""Pages of FP8 keys and values: how far numbers are from what was kept, and what else they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch

from slipstream.common.device.interface import Device
from slipstream.common.errors import ConfigError
from slipstream.services.factory import keeps_fp8_kv
from slipstream.services.models.paged_kv import PagedKV
from slipstream.services.worker.config import WorkerConfig
from tests.harness.paged_model import CPU, PagedModel

NUM_ROWS = 5 * 8


def kept(model: PagedModel, values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is read of values that were kept: [NUM_ROWS, 2 * kv_size]."""
    cache = PagedKV(model.decoder.config, num_pages=5, page_size=8, device=CPU, dtype=dtype, is_fp8=True)
    places = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1))
    cache.keep(1, places, values.to(dtype))
    output = torch.empty(values.shape, dtype=dtype)
    cache.gather(1, places, output)
    return output


def some_values(model: PagedModel) -> torch.Tensor:
    return torch.randn(NUM_ROWS, 2 * model.decoder.config.kv_size, generator=torch.Generator().manual_seed(3))


def test_pages_take_the_bytes_that_are_planned(model: PagedModel) -> None:
    config = model.decoder.config
    cache = PagedKV(config, num_pages=5, page_size=8, device=CPU, dtype=torch.bfloat16, is_fp8=True)
    assert cache.scales is not None
    num_bytes = sum(part.nbytes for part in (*cache.rows, *cache.scales))
    assert num_bytes == NUM_ROWS * config.kv_bytes_per_token(torch.bfloat16, is_fp8=True)
    assert num_bytes < NUM_ROWS * 0.6 * config.kv_bytes_per_token(torch.bfloat16)


def test_numbers_are_within_a_sixteenth_and_exact_in_bfloat16(model: PagedModel) -> None:
    """Also where vectors are of very different sizes; small numbers of a vector are within its greatest's share."""
    values = some_values(model)
    vectors = values.view(-1, model.decoder.config.head_dim)
    vectors.mul_(2.0 ** torch.linspace(-60, 60, len(vectors))[:, None])
    found = kept(model, values)
    most = vectors.abs().amax(dim=1, keepdim=True).expand_as(vectors).reshape(values.shape)
    assert ((found - values).abs() <= torch.maximum(values.abs() / 16, most * 2**-17)).all()
    assert torch.equal(found.to(torch.bfloat16).float(), found)
    assert torch.equal(kept(model, values.to(torch.bfloat16), torch.bfloat16).float(), kept(model, values.bfloat16()))


def test_the_greatest_numbers_of_a_scale(model: PagedModel) -> None:
    """Up to 1.75 times a power of two a vector's greatest number is e4m3's; beyond, the scale is the next."""
    for greatest in (1.75, 1.7500001, 1.99, 1.0, 448.0, 1e-30):
        values = torch.zeros(NUM_ROWS, 2 * model.decoder.config.kv_size)
        values[:, ::16] = greatest
        found = kept(model, values)
        assert found.isfinite().all()
        assert ((found - values).abs() <= greatest / 16).all()
    assert torch.equal(kept(model, torch.zeros_like(values)), torch.zeros_like(values))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(model: PagedModel, value: float) -> None:
    values = some_values(model)
    values[3, 5] = value
    found = kept(model, values)
    assert found[3, 5].isnan()
    assert found[:3].isfinite().all()
    assert found[4:].isfinite().all()


def test_a_vector_depends_on_no_other(model: PagedModel) -> None:
    values = some_values(model)
    others = values.clone()
    others[1:] *= 1000.0
    others[0, model.decoder.config.head_dim :] *= 3.0
    size = model.decoder.config.head_dim
    assert torch.equal(kept(model, values)[0, :size], kept(model, others)[0, :size])


def test_a_gpu_that_cannot_convert_the_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, config = cast("Device", SimpleNamespace(torch_device=torch.device("cuda"))), WorkerConfig(model=tmp_path)
    for capability in ((8, 0), (8, 9), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(return_value=capability))
        assert not keeps_fp8_kv(config, cuda)
        if capability > (8, 0):
            assert keeps_fp8_kv(replace(config, kv_dtype="fp8"), cuda)
            continue
        with pytest.raises(ConfigError, match=r"kv_dtype: got 'fp8', .*: auto, on a GPU of compute capability"):
            keeps_fp8_kv(replace(config, kv_dtype="fp8"), cuda)
