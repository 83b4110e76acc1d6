"""The compose files against their specification and against the code that they start."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import patch

import check_jsonschema
import pytest
import typer.main
import yaml
from click.testing import CliRunner

from slipstream.bundled import target_dir
from slipstream.cli import mps
from slipstream.cli.main import app
from slipstream.common.rpc.address import TcpAddress, UnixAddress, parse_address
from slipstream.common.rpc.logs import FORMATS
from slipstream.door.config import DoorConfig
from slipstream.door.main import door
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.main import gateway
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.main import scheduler
from slipstream.services.command_line import draft, verify
from slipstream.services.grammar_main import grammar
from slipstream.services.worker.config import WorkerConfig
from tests.harness.compose_files import DEPLOY, VARIABLE, load, scraped

VARIANTS = {
    "gpu": ("compose.yaml", "compose.gpu.yaml"),
    "no-mps": ("compose.yaml", "compose.gpu.yaml", "compose.no-mps.yaml"),
    "two-gpus": ("compose.yaml", "compose.gpu.yaml", "compose.two-gpus.yaml"),
    "cpu": ("compose.yaml", "compose.cpu.yaml"),
}
COMMANDS: dict[str, tuple[str, Callable[..., None]]] = {
    "verify": ("slipstream-verify", verify),
    "draft": ("slipstream-draft", draft),
    "grammar": ("slipstream-grammar", grammar),
    "scheduler": ("slipstream-scheduler", scheduler),
    "gateway": ("slipstream-gateway", gateway),
    "door": ("slipstream-door", door),
}
ON_THE_DEVICE = ("verify", "draft", "scheduler")
MEMBERS = (*COMMANDS, "prometheus", "grafana")
BUNDLED_IN_IMAGE = PurePosixPath("/opt/slipstream/bundled")


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each way to start it."""
    name: str = request.param
    return name


@pytest.fixture
def project(variant: str) -> dict[str, Any]:
    """The project that docker-compose reads from the variant's files."""
    return load(*VARIANTS[variant])


def options(service: str, project: dict[str, Any]) -> dict[str, Any]:
    """A service's command line, read by the code that it is for."""
    program, *arguments = project["services"][service]["command"]
    expected, function = COMMANDS[service]
    assert program == expected
    command_line = typer.Typer()
    command_line.command()(function)
    command = typer.main.get_command(command_line)
    with patch.dict(os.environ, project["services"][service].get("environment", {})):
        return dict(command.make_context(program, list(arguments)).params)


def configuration(kind: type, found: dict[str, Any]) -> Any:
    """Checks itself, with the image's models where they lie here."""
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: _here(value) for name, value in found.items() if name in names}
    return kind(**values)


def _here(value: Any) -> Any:
    is_bundled = isinstance(value, Path) and value.is_relative_to(BUNDLED_IN_IMAGE)
    return target_dir().parent / value.relative_to(BUNDLED_IN_IMAGE) if is_bundled else value


def test_follows_the_compose_specification(project: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "compose.json"

    def complaints() -> str:
        file.write_text(json.dumps(project), encoding="utf-8")
        arguments = ["--builtin-schema", "vendor.compose-spec", str(file)]
        return CliRunner().invoke(check_jsonschema.main, arguments).stdout

    assert complaints().strip() == "ok -- validation done"
    project["services"]["verify"]["healthcheck"]["intervall"] = "5s"
    assert "intervall" in complaints()


@pytest.mark.slow
def test_podman_compose_reads_the_same(project: dict[str, Any], variant: str, tmp_path: Path) -> None:
    """It wants a podman, of which it asks only the version here."""
    (tmp_path / "podman").write_text("#!/bin/sh\necho podman version 4.3.1\n", encoding="utf-8")
    (tmp_path / "podman").chmod(0o700)
    files = [word for name in VARIANTS[variant] for word in ("-f", str(DEPLOY / name))]
    profiles = [word for name in ("openai", "observe") for word in ("--profile", name)]
    command = (sys.executable, "-m", "podman_compose", *files, *profiles, "config")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    read = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=60, check=True)
    found = yaml.safe_load(read.stdout)
    for name, service in project["services"].items():
        # It lists an argument of a build twice, of which the last one counts, and says whole paths.
        assert found["services"][name].pop("build", {}).keys() == service.pop("build", {}).keys()
    assert found["services"] == project["services"]
    assert found["volumes"] == project["volumes"]


def test_workers_are_started_as_they_can_be(project: dict[str, Any], variant: str) -> None:
    device = "cpu" if variant == "cpu" else "cuda"
    for service in ("verify", "draft"):
        found = options(service, project)
        assert configuration(WorkerConfig, found).device == device
        assert found["log_format"] in FORMATS
        assert isinstance(parse_address(found["listen"]), UnixAddress)
    # A standalone draft needs no target's directory; a head leaves the embedding to it.
    assert options("draft", project)["target"] == options("verify", project)["model"]


def test_the_scheduler_finds_its_workers(project: dict[str, Any], variant: str) -> None:
    found = options("scheduler", project)
    config = configuration(SchedulerConfig, found)
    assert config.device == ("cpu" if variant == "cpu" else "cuda")
    assert config.verify == options("verify", project)["listen"]
    assert config.draft == options("draft", project)["listen"]
    assert config.grammar == options("grammar", project)["listen"]
    assert found["log_format"] in FORMATS
    assert _seconds(project["services"]["scheduler"]["stop_grace_period"]) > config.grace_s


def test_the_gateway_finds_its_scheduler(project: dict[str, Any]) -> None:
    found = options("gateway", project)
    config = configuration(GatewayConfig, found)
    assert config.scheduler == options("scheduler", project)["listen"]
    assert config.journal_path is not None
    assert f" {config.state_dir}\n" in (DEPLOY / "gateway.Dockerfile").read_text(encoding="utf-8"), "the user's own"
    assert found["log_format"] in FORMATS
    assert _seconds(project["services"]["gateway"]["stop_grace_period"]) > config.grace_s


def test_the_door_finds_its_gateway(project: dict[str, Any]) -> None:
    found = options("door", project)
    config = configuration(DoorConfig, found)
    assert config.gateway == options("gateway", project)["listen"].replace("0.0.0.0", "127.0.0.1")
    assert found["log_format"] in FORMATS
    assert _seconds(project["services"]["door"]["stop_grace_period"]) > config.grace_s
    assert "'openai'" in (DEPLOY / "gateway.Dockerfile").read_text(encoding="utf-8")


def test_an_eagle3_head_can_take_the_draft_s_place() -> None:
    chosen = {"SLIPSTREAM_ALGORITHM": "eagle3", "SLIPSTREAM_DRAFT": str(BUNDLED_IN_IMAGE / "eagle3")}
    for files in VARIANTS.values():
        config = configuration(WorkerConfig, options("draft", load(*files, environment=chosen)))
        assert config.algorithm == "eagle3"
        assert config.target is not None


def test_prometheus_asks_where_they_answer(project: dict[str, Any]) -> None:
    asked = {job: target for job, static in scraped().items() for target in static["targets"]}
    # A door that is not there is no fault.
    always = [name for name in COMMANDS if name != "door"]
    answered = {f"slipstream-{name}": f"127.0.0.1:{options(name, project)['metrics_port']}" for name in always}
    assert asked == answered


def test_the_workflow_waits_for_all_services_and_dashboards() -> None:
    workflow = (DEPLOY.parent / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    assert re.findall(r'== \\"(\d+)\\"', workflow) == [str(len(scraped()))]
    assert re.findall(r'"length == (\d+)"', workflow) == [str(len([*DEPLOY.glob("grafana/dashboards/*.json")]))]


def test_published_ports_are_those_that_are_served(project: dict[str, Any]) -> None:
    services = project["services"]
    assert {name for name, service in services.items() if "ports" in service} == {"anchor"}
    published = {int(port.rpartition(":")[2]): port.rpartition(":")[0] for port in services["anchor"]["ports"]}
    listen = parse_address(options("gateway", project)["listen"])
    assert isinstance(listen, TcpAddress)
    prometheus = next(part for part in services["prometheus"]["command"] if part.startswith("--web.listen-address="))
    grafana = services["grafana"]["environment"]["GF_SERVER_HTTP_PORT"]
    openai = parse_address(options("door", project)["listen"])
    assert isinstance(openai, TcpAddress)
    assert set(published) == {listen.port, openai.port, int(prometheus.rpartition(":")[2]), int(grafana)}
    assert all(host.startswith("127.0.0.1:") for host in published.values()), "nobody but this host by default"
    assert f":{listen.port}" in services["gateway"]["healthcheck"]["test"][-1]


def test_health_checks_ask_the_service_itself(project: dict[str, Any]) -> None:
    health = typer.main.get_command(app)
    assert "health" in health.commands  # type: ignore[attr-defined]
    for name in COMMANDS:
        test = project["services"][name]["healthcheck"]["test"]
        assert test[:3] == ["CMD", "slipstream", "health"]
        listen = options(name, project)["listen"].replace("0.0.0.0", "127.0.0.1")
        if name == "door":
            listen = f"http://{options(name, project)['private_listen']}"
        # The gateway's process is not in the namespace of the others, and its address says nothing of it.
        assert test[3:] == ([listen] if name in ("gateway", "door") else [listen, "--kill-hung"])
        assert _seconds(project["services"][name]["healthcheck"]["timeout"]) >= (
            10 if name in ("gateway", "door") else 30
        )


def test_dependencies(project: dict[str, Any]) -> None:
    services = project["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_healthy"
            assert "healthcheck" in services[other]
            needed = set(services[other].get("profiles", ()))
            assert not needed or needed == set(service.get("profiles", ())), f"{name} without {other}"
    assert set(services["scheduler"]["depends_on"]) == {"anchor", "verify"}
    assert set(services["gateway"]["depends_on"]) == {"anchor", "scheduler"}
    assert {name for name in services if "profiles" in services[name]} == {"prometheus", "grafana", "door"}


def test_each_service_is_started_again_whatever_ends_it(project: dict[str, Any]) -> None:
    services = project["services"]
    assert {services[name]["restart"] for name in ("anchor", *MEMBERS)} == {"on-failure:3"}
    # An end of the draft's or the grammar worker's takes no other service with it.
    assert not any({"draft", "grammar"} & {*service.get("depends_on", {})} for service in services.values())


def test_they_live_together_like_a_pod(project: dict[str, Any]) -> None:
    services = project["services"]
    assert set(services) == {"anchor", *MEMBERS}
    assert services["anchor"]["ipc"] == "shareable"
    assert not {"network_mode", "pid"} & set(services["anchor"])
    for name in MEMBERS:
        assert services[name]["network_mode"] == "service:anchor"
        if name in ON_THE_DEVICE:
            assert services[name]["pid"] == services[name]["ipc"] == "service:anchor"
        if name in COMMANDS:
            assert "anchor" in services[name]["depends_on"]


def test_the_gateway_gets_no_more_than_it_needs(project: dict[str, Any]) -> None:
    gateway = project["services"]["gateway"]
    assert not {"pid", "ipc", "environment"} & set(gateway)
    assert "reservations" not in gateway["deploy"]["resources"]
    targets = {mount["target"] if isinstance(mount, dict) else mount.split(":")[1] for mount in gateway["volumes"]}
    assert targets == {"/run/slipstream", "/var/lib/slipstream", "/models"}


def test_services_have_no_more_rights_than_they_need(project: dict[str, Any]) -> None:
    user = re.search(r"^USER (\S+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert user is not None
    for name, service in project["services"].items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "cap_add" not in service
        assert "privileged" not in service
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert int(service["user"].partition(":")[0]) > 0
        assert set(service["deploy"]["resources"]["limits"]) == {"memory", "pids"}
        assert service["logging"]["options"]
        assert _seconds(service["stop_grace_period"]) > 0
        if name not in ("prometheus", "grafana"):
            assert service["user"] == user[1]
    for volume in ("sockets", "mps"):
        mount = project["volumes"][volume]["driver_opts"]
        assert mount["type"] == "tmpfs"
        uid, gid = user[1].split(":")
        assert {f"uid={uid}", f"gid={gid}", "mode=0700"} < set(mount["o"].split(","))


def test_the_gpu_is_reserved_where_it_is_used(project: dict[str, Any], variant: str) -> None:
    for name in ("anchor", *ON_THE_DEVICE):
        resources = project["services"][name]["deploy"]["resources"]
        if variant == "cpu":
            assert "reservations" not in resources
            continue
        devices, numbers = resources["reservations"]["devices"], "01" if variant == "two-gpus" else "0"
        assert devices == [{"driver": "nvidia", "device_ids": [number], "capabilities": ["gpu"]} for number in numbers]
    ranks = project["services"]["verify"].get("environment", {}).get("SLIPSTREAM_TENSOR_PARALLEL_SIZE")
    assert ranks == ("2" if variant == "two-gpus" else None)


def test_services_under_mps(project: dict[str, Any], variant: str) -> None:
    services = project["services"]
    source = Path(mps.__file__).read_text(encoding="utf-8")
    pipes = {}
    for name in ("anchor", *ON_THE_DEVICE):
        environment = services[name].get("environment", {})
        assert all(
            f'"{variable}"' in source
            for variable in environment
            if not variable.endswith(("CACHE_DIR", "PATH", "TENSOR_PARALLEL_SIZE", "DEVICE"))
        )
        pipes[name] = environment.get("CUDA_MPS_PIPE_DIRECTORY")
    inside, outside = "/run/mps", mps.outside_mps(Path("/run/mps"))["CUDA_MPS_PIPE_DIRECTORY"]
    if variant == "no-mps":
        assert pipes["verify"] == pipes["draft"] == pipes["scheduler"] == outside
    else:
        assert pipes == {"anchor": inside, "verify": inside, "draft": inside, "scheduler": outside}
    is_daemon = services["anchor"]["command"] == [mps.CONTROL, "-f"]
    assert is_daemon is (variant in ("gpu", "two-gpus"))


def test_compiled_kernels_outlive_a_container(project: dict[str, Any]) -> None:
    """Each worker has a volume of its own: verify runs nothing that a draft has written."""
    folder = "/var/cache/slipstream"
    sources = []
    for name in ("verify", "draft"):
        service = project["services"][name]
        environment = service.get("environment") or {}
        kept = [environment.get(variable, "") for variable in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")]
        assert all(path.startswith(f"{folder}/") for path in kept)
        mounts = [mount for mount in service["volumes"] if not isinstance(mount, dict)]
        sources += [mount.split(":")[0] for mount in mounts if mount.split(":")[1] == folder]
    assert len(set(sources)) == 2
    assert all(project["volumes"][source] == {} for source in sources)
    assert f"--owner 10001 --group 10001 {folder}" in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def test_mounted_files_exist(project: dict[str, Any]) -> None:
    for name, service in project["services"].items():
        targets = []
        for mount in service["volumes"]:
            if isinstance(mount, dict):
                assert mount["bind"] == {"create_host_path": False}
                source, target = mount["source"], mount["target"]
            else:
                source, target = mount.split(":")[:2]
            targets.append(PurePosixPath(target))
            if source.startswith("."):
                assert (DEPLOY / source).resolve().is_dir(), f"{name}: {source}"
            else:
                assert source in project["volumes"]
        for path in _paths_of(service):
            assert any(path.is_relative_to(target) for target in targets), f"{name}: {path}"


def test_grafana_finds_its_dashboards_and_prometheus(project: dict[str, Any]) -> None:
    mounts = dict(reversed(mount.split(":")[:2]) for mount in project["services"]["grafana"]["volumes"])
    provisioning = DEPLOY / mounts["/etc/grafana/provisioning"]
    providers = yaml.safe_load((provisioning / "dashboards" / "slipstream.yml").read_text(encoding="utf-8"))
    dashboards = DEPLOY / mounts[providers["providers"][0]["options"]["path"]]
    assert list(dashboards.glob("*.json"))
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text(encoding="utf-8"))
    ready = project["services"]["prometheus"]["healthcheck"]["test"][-1]
    assert ready.startswith(sources["datasources"][0]["url"])


def test_the_example_of_settings_names_them_all_with_their_defaults() -> None:
    text = (DEPLOY / ".env.example").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^# ([A-Z_]+)=(.*)$", text, re.MULTILINE))
    used: dict[str, str] = {}
    for name in ("compose.yaml", "compose.gpu.yaml", "compose.no-mps.yaml"):
        used |= dict(VARIABLE.findall((DEPLOY / name).read_text(encoding="utf-8")))
    assert listed == used
    cpu = dict(VARIABLE.findall((DEPLOY / "compose.cpu.yaml").read_text(encoding="utf-8")))
    assert {name: default for name, default in cpu.items() if used.get(name) != default} == {
        "SLIPSTREAM_IMAGE": "slipstream:cpu"
    }


def _paths_of(service: dict[str, Any]) -> list[PurePosixPath]:
    """Lists the paths in its command line and environment, except the image's own and those in its tmpfs."""
    words = [*(service.get("command") or ()), *(service.get("environment") or {}).values()]
    found = [re.search(r"(?:^|=|unix:)(/[\w/.-]+)$", word) for word in words]
    paths = [PurePosixPath(match[1]) for match in found if match is not None]
    return [path for path in paths if not path.is_relative_to("/tmp") and not path.is_relative_to(BUNDLED_IN_IMAGE)]


def _seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration.removesuffix("s"))
