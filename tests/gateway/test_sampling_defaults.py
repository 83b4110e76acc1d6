"""Sampling parameters that a model's `generation_config.json` has: read, said, and for requests that name none only."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.client import AsyncClient
from slipstream.common.errors import CheckpointError, ConfigError
from slipstream.common.wire.server import SamplingDefaults
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.model import ServedModel, load_model
from tests.harness.checkpoints import write_json, write_tokenizer
from tests.harness.doors import running_door
from tests.harness.generation_server import GenerationServer, collect, generation_server
from tests.harness.scripted_scheduler import DESCRIPTION

OF_MODEL = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)


def loaded(path: Path, given: object, last: ServedModel | None = None, **options: Any) -> ServedModel:
    """The model in a directory with this `generation_config.json`."""
    write_json(path / "generation_config.json", given)
    description = replace(DESCRIPTION, tokenizer_path=str(path))
    return load_model(description, last, max_samples=1, **options)


def test_a_models_file_is_read_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(tmp_path)
    with caplog.at_level(logging.INFO, logger="slipstream"):
        model = loaded(tmp_path, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3})
    assert model.limits.sampling_defaults == OF_MODEL
    said = "sampling parameters of requests that name none, by generation_config.json: temperature 0.6, top_k 20"
    assert f"{said}, top_p 0.95" in caplog.text
    assert loaded(tmp_path, {"do_sample": True, "top_k": -1}, model).limits.sampling_defaults == SamplingDefaults(
        temperature=1.0, top_k=0
    )
    for given in ({"eos_token_id": 3, "temperature": None}, {"min_p": 0.1}):
        expected = SamplingDefaults(min_p=given.get("min_p"))
        assert loaded(tmp_path, given, model).limits.sampling_defaults == expected
    unread = loaded(tmp_path, {"temperature": 0.6}, model, has_defaults=False)
    assert unread.limits.sampling_defaults == SamplingDefaults()
    (tmp_path / "generation_config.json").unlink()
    description = replace(DESCRIPTION, tokenizer_path=str(tmp_path))
    assert load_model(description, model, max_samples=1).limits.sampling_defaults == SamplingDefaults()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temperature": "hot"}, "temperature: got 'hot', "),
        ({"temperature": 1e9}, "temperature: got 1000000000.0, "),
        ({"temperature": True}, "temperature: got True, "),
        ({"top_p": 0}, "top_p: got 0, "),
        ({"top_k": 1.5}, "top_k: got 1.5, "),
        ({"top_k": 2**40}, f"top_k: got {2**40}, "),
        ({"min_p": float("nan")}, "min_p: got nan, "),
        ({"repetition_penalty": -1.0}, "repetition_penalty: got -1.0, "),
        ([], "got a list, supported: a JSON object"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, given: object, field: str) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, given)
    assert str(caught.value).startswith(f"{tmp_path}: generation_config.json: {field}")
    if isinstance(given, dict):
        assert str(caught.value).endswith("or --generation-config none")
        assert loaded(tmp_path, given, has_defaults=False)


def test_the_setting_has_two_values() -> None:
    assert GatewayConfig(scheduler="unix:/s").generation_config == "auto"
    with pytest.raises(ConfigError, match=r"generation_config: got 'some', accepted: auto, none"):
        GatewayConfig(scheduler="unix:/s", generation_config="some")


def found(server: GenerationServer) -> tuple[float, int, float]:
    """What the last request is sampled with, as far as the wire's float32 keeps it."""
    sampling = server.loop.submitted[-1].spec.sampling
    return round(sampling.temperature, 6), sampling.top_k, round(sampling.top_p, 6)


@pytest.fixture
async def server() -> AsyncIterator[GenerationServer]:
    """A gateway whose model has defaults."""
    async with generation_server() as running:
        running.model.limits = replace(running.model.limits, sampling_defaults=OF_MODEL)
        yield running


async def test_what_a_request_names_goes_first(server: GenerationServer, client: AsyncClient) -> None:
    await collect(client.generate([5, 6], max_new_tokens=1))
    assert found(server) == (0.6, 20, 0.95)
    await collect(client.generate([5, 6], max_new_tokens=1, temperature=0.0, top_k=0))
    assert found(server) == (0.0, 0, 0.95)
    assert (await client.server_info()).sampling_defaults == OF_MODEL
    server.model.limits = replace(server.model.limits, sampling_defaults=SamplingDefaults())
    assert (await client.server_info()).sampling_defaults is None


async def test_they_go_before_openais(server: GenerationServer) -> None:
    async with running_door(server.address) as door:
        for given, expected in (
            ({}, (0.6, 20, 0.95)),
            ({"temperature": 0.25, "top_k": -1}, (0.25, 0, 0.95)),
            ({"top_p": 1}, (0.6, 20, 1.0)),
        ):
            answer = await door.post("/v1/completions", prompt=[5, 6], max_tokens=1, **given)
            assert answer.status_code == 200, answer.text
            assert found(server) == expected
