"""Settings of `up` that are refused, and the command lines that the others become."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import up_config
from slipstream.cli.models import ModelChoice
from slipstream.cli.mps import MpsMode
from slipstream.cli.up_config import (
    UpConfig,
    dialled,
    door_commands,
    gateway_commands,
    grammar_commands,
    scheduler_command,
    worker_command,
)
from slipstream.common.errors import ConfigError
from slipstream.gateway import config as gateway_config
from slipstream.services.worker.config import Shares
from tests.harness.compose_files import scraped

# Checked by then: any directory will do.
MODELS = ModelChoice(target=Path("/usr"), draft=Path("/tmp"), algorithm="standalone", num_draft_tokens=3)


def test_a_user_without_a_home_has_a_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "home", fail)
    assert up_config.default_state_dir() == tmp_path / f"slipstream-{os.geteuid()}"


@pytest.mark.parametrize(
    ("field", "setting"),
    [
        ("device", {"device": "tpu"}),
        ("fence", {"fence": "host"}),
        ("fence", {"fence": "event", "device": "cpu"}),
        ("mps", {"mps": "yes"}),
        ("mps", {"mps": "on", "device": "cpu"}),
        ("dtype", {"dtype": "int8"}),
        ("kv_dtype", {"kv_dtype": "bfloat16"}),
        ("load_format", {"load_format": "gguf"}),
        ("simulate_accept_length", {"simulate_accept_length": 0.5}),
        ("simulate_accept_by_position", {"simulate_accept_by_position": Shares.parse("0.9,1.5")}),
        (
            "simulate_accept_by_position",
            {"simulate_accept_by_position": Shares.parse("0.9,0.5"), "simulate_accept_length": 2.0},
        ),
        ("prompt_lookup_min", {"prompt_lookup_min": 3, "prompt_lookup_max": 2}),
        ("suffix_cache_tokens", {"suffix_cache_tokens": -1}),
        ("tensor_parallel_size", {"tensor_parallel_size": 3}),
        ("share_weights", {"share_weights": True, "tensor_parallel_size": 2}),
        ("slots", {"slots": 0}),
        ("run_ahead", {"run_ahead": -1}),
        ("context_tokens", {"context_tokens": 1}),
        ("kv_memory_mib", {"kv_memory_mib": 0}),
        ("page_tokens", {"page_tokens": 0}),
        ("draft_timeout_ms", {"draft_timeout_ms": 0}),
        ("step_timeout_s", {"step_timeout_s": 0}),
        ("max_restarts", {"max_restarts": -1}),
        ("hang_timeout_s", {"hang_timeout_s": 0}),
        ("queue", {"queue": 0}),
        ("stream_interval_ms", {"stream_interval_ms": -1}),
        ("kept_jobs", {"kept_jobs": -1}),
        ("job_ttl_s", {"job_ttl_s": 0}),
        ("read_timeout_s", {"read_timeout_s": float("inf")}),
        ("outage_timeout_s", {"outage_timeout_s": 0}),
        ("threads", {"threads": 0}),
        ("drain_timeout_s", {"drain_timeout_s": float("nan")}),
        ("metrics_port", {"metrics_port": -1}),
        ("metrics_port", {"metrics_port": 65531}),
        ("metrics_port", {"metrics_port": 65530, "gateways": 2}),
        ("log_level", {"log_level": "LOUD"}),
        ("log_format", {"log_format": "xml"}),
        ("openai_port", {"openai_port": 65536}),
        ("openai_workers", {"openai_workers": 0}),
        ("openai_listen", {"openai_port": 0, "openai_listen": "127.0.0.1:1"}),
        ("openai_listen", {"openai_listen": "0.0.0.0:8000"}),
        ("openai_listen", {"openai_listen": "unix:/tmp/door.sock"}),
        ("tool_call_parser", {"tool_call_parser": "json"}),
        ("served_model_name", {"served_model_name": "a,,b"}),
        ("listen", {"listen": "50051"}),
        ("listen", {"listen": "0.0.0.0:50051"}),
        ("state_dir", {"state_dir": Path("/tmp") / ("x" * 100)}),
    ],
)
def test_a_wrong_setting_is_named(field: str, setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        UpConfig(models=MODELS, **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize(("setting", "extra"), [({"openai_port": 8000}, "openai"), ({"vllm_engine": True}, "smg")])
def test_an_interface_needs_its_extra(setting: dict[str, Any], extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    UpConfig(models=MODELS, **setting)
    for module in (up_config, gateway_config):
        monkeypatch.setattr(module, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=rf"slipstream-serve\[{extra}\]"):
        UpConfig(models=MODELS, **setting)


def test_each_door_has_a_gateway_and_a_socket_of_its_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:ann-0123456789abcdef\n")
    settings: dict[str, Any] = {"gateways": 2, "openai_workers": 3, "openai_port": 0, "api_keys": keys}
    config = UpConfig(models=MODELS, state_dir=tmp_path, **settings)
    commands = door_commands(config, "127.0.0.1:5")
    given = [dict(pairwise(command.argv)) for command in commands]
    gateways = [config.gateway(index).private_listen for index in (0, 1, 0)]
    assert [one["--gateway"] for one in given] == gateways
    assert [f"http://{one['--private-listen']}" for one in given] == [command.address for command in commands]
    assert all("--asks-for-keys" in command.argv and "--api-keys" not in command.argv for command in commands)
    assert len({command.address for command in commands}) == 3


def test_every_setting_reaches_its_service(tmp_path: Path) -> None:
    config = UpConfig(
        models=MODELS,
        state_dir=tmp_path,
        slots=5,
        queue=20_000,
        threads=2,
        device="cuda",
        fence="event",
        stream_interval_ms=2.5,
        kept_jobs=7,
        job_ttl_s=8.5,
        read_timeout_s=9.5,
        outage_timeout_s=10.5,
        drain_timeout_s=11.5,
        dtype="float16",
        kv_dtype="fp8",
        load_format="dummy",
        simulate_accept_length=2.5,
        tensor_parallel_size=2,
        deterministic=True,
        metrics_port=9500,
        log_level="DEBUG",
        log_format="json",
        log_max_mib=5,
        insecure_public=True,
    )
    draft, verify = (" ".join(worker_command(config, name).argv) for name in ("draft", "verify"))
    commands = scheduler_command(config), *gateway_commands(config, "0.0.0.0:1234")
    assert [command.address for command in commands] == [f"unix:{tmp_path}/sockets/scheduler.sock", "127.0.0.1:1234"]
    assert all(command.restarts for command in commands)
    assert all(worker_command(config, name).restarts for name in config.workers)
    scheduler, gateway = (" ".join(command.argv) for command in commands)
    assert "--model /tmp" in draft
    assert f"--listen unix:{tmp_path}/sockets/draft.sock" in draft
    assert "--model /usr" in verify
    assert f"--listen unix:{tmp_path}/sockets/verify.sock" in verify
    assert "--threads 2" in draft
    assert "--threads 2" in verify
    assert f"--verify unix:{tmp_path}/sockets/verify.sock" in scheduler
    assert f"--draft unix:{tmp_path}/sockets/draft.sock " in scheduler
    assert "--num-draft-tokens 3" in scheduler
    assert f"--listen unix:{tmp_path}/sockets/scheduler.sock" in scheduler
    assert "--listen 0.0.0.0:1234" in gateway
    assert "--insecure-public" in gateway
    assert f"--scheduler unix:{tmp_path}/sockets/scheduler.sock" in gateway
    assert "--slots 5" in scheduler
    assert "--max-sequences 40010" in scheduler, "what waits at the gateway, or was cancelled there, has room"
    assert "--queue 20000" in gateway
    assert "--device cuda --fence event" in scheduler
    assert "--device cuda" in draft
    assert "--dtype float16 --kv-dtype fp8 --load-format dummy" in draft
    assert "--dtype float16 --kv-dtype fp8 --tensor-parallel-size 2 --load-format dummy" in verify
    assert "--simulate-accept-length 2.5" in verify
    assert "--deterministic-width 4" in verify
    assert "--max-batched-tokens 512" in scheduler, "every step of prompts is padded to a whole chunk"
    assert "--no-prefix-cache" in scheduler, "a page of an output may be rounded otherwise than one of a prompt"
    assert "--simulate-accept-length" not in draft
    assert "--metrics-port 9500 " in scheduler
    assert "--metrics-port 9501 " in verify
    assert "--metrics-port 9502 " in draft
    assert "--metrics-port 9503 " in gateway
    assert all("--log-level DEBUG --log-format json" in service for service in (gateway, scheduler, verify, draft))
    assert "--stream-interval-ms 2.5 --kept-jobs 7 --job-ttl-s 8.5 --read-timeout-s 9.5" in gateway
    assert "--outage-timeout-s 10.5" in gateway
    assert "--grace-s 11.5" in gateway


def test_metrics_are_where_prometheus_expects_them_unless_clients_take_any_port() -> None:
    expected = {job: static["targets"] for job, static in scraped().items()}
    names = ("scheduler", "verify", "draft", "gateway", "grammar")
    config = UpConfig(models=MODELS)
    assert expected == {f"slipstream-{name}": [f"127.0.0.1:{config.metrics_port_of(name)}"] for name in names}
    for free in (UpConfig(models=MODELS, listen="127.0.0.1:0"), UpConfig(models=MODELS, metrics_port=0)):
        assert [free.metrics_port_of(name) for name in names] == [0, 0, 0, 0, 0]
    given = UpConfig(models=MODELS, listen="127.0.0.1:0", metrics_port=9500)
    assert [given.metrics_port_of(name) for name in names] == [9500, 9501, 9502, 9503, 9505]


@pytest.mark.parametrize(
    ("constraints", "device", "is_started"),
    [("auto", "cpu", True), ("on", "cpu", True), ("off", "cpu", False), ("auto", "cuda", True), ("on", "cuda", True)],
)
def test_a_grammar_worker_is_started_on_every_device(
    constraints: str, device: str, is_started: bool, tmp_path: Path
) -> None:
    config = UpConfig(models=MODELS, state_dir=tmp_path, constraints=constraints, device=device)
    commands = grammar_commands(config)
    assert len(commands) == is_started
    assert config.scheduler.grammar == (config.socket("grammar") if is_started else None)
    if is_started:
        assert commands[0].is_optional
        assert commands[0].restarts


def test_a_grammar_worker_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.cli.up_config.find_spec", lambda name: None)
    assert grammar_commands(UpConfig(models=MODELS, state_dir=tmp_path, device="cpu")) == []
    with pytest.raises(ConfigError, match=r"constraints: got 'on', .* slipstream-serve\[constraints\]"):
        UpConfig(models=MODELS, state_dir=tmp_path, device="cpu", constraints="on")


def test_without_a_draft_nothing_names_one(tmp_path: Path) -> None:
    config = UpConfig(models=replace(MODELS, draft=None, algorithm="none"), state_dir=tmp_path)
    assert config.workers == ("verify",)
    assert "--draft" not in scheduler_command(config).argv


def test_prompt_lookup_has_the_target_and_its_settings_alone(tmp_path: Path) -> None:
    lookup = ModelChoice(target=Path("/usr"), draft=None, algorithm="ngram")
    config = UpConfig(models=lookup, state_dir=tmp_path, prompt_lookup_min=2, prompt_lookup_max=4)
    config = replace(config, suffix_cache_tokens=9000)
    assert config.workers == ("verify", "draft")
    assert "--draft" in scheduler_command(config).argv
    draft, verify = (" ".join(worker_command(config, name).argv) for name in ("draft", "verify"))
    assert "--algorithm ngram --target /usr" in draft
    assert "--model" not in draft
    assert "--prompt-lookup-min 2 --prompt-lookup-max 4 --suffix-cache-tokens 9000" in draft
    assert "--prompt-lookup" not in verify
    assert "--suffix-cache" not in verify
    other = worker_command(replace(config, models=MODELS), "draft")
    assert not {"--prompt-lookup-min", "--suffix-cache-tokens"} & set(other.argv), "they wait for a swap"


def test_a_wildcard_is_dialled_at_the_loopback() -> None:
    assert [dialled(listen) for listen in ("0.0.0.0:1", "[::]:1", "localhost:1")] == [
        "127.0.0.1:1",
        "[::1]:1",
        "localhost:1",
    ]


@pytest.mark.parametrize(
    ("mps", "device", "has_gpu", "mode"),
    [
        ("auto", "auto", True, MpsMode.AUTO),
        ("auto", "auto", False, MpsMode.OFF),
        ("auto", "cpu", True, MpsMode.OFF),
        ("off", "auto", True, MpsMode.OFF),
        ("on", "auto", False, MpsMode.ON),
    ],
)
def test_mps_is_only_tried_where_there_may_be_a_gpu(
    mps: str, device: str, has_gpu: bool, mode: MpsMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_config, "has_nvidia_device", lambda: has_gpu)
    assert UpConfig(models=MODELS, mps=mps, device=device).mps_mode is mode
