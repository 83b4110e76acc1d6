"""The command line as a user meets it, without any service."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from slipstream.cli.main import app
from tests.harness.grpc_server import unserved_address
from tests.harness.running import free_ports, slipstream


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (("main", "up", "status", "supervisor"), ("torch", "transformers", "numpy", "prometheus_client")),
        (("trace", "demo"), ("torch", "transformers")),
    ],
)
def test_no_command_imports_what_only_services_need(modules: tuple[str, ...], heavy: tuple[str, ...]) -> None:
    imports = "; ".join(f"import slipstream.cli.{module}" for module in modules)
    code = f"import sys; {imports}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=20, check=True)
    assert found.stdout.strip() == "[]"


def test_an_option_for_a_time_ends_with_its_unit() -> None:
    group = typer.main.get_group(app)
    params = [param for command in group.commands.values() for param in command.params]
    units = {param.opts[0]: param.metavar for param in params if param.metavar in ("SECONDS", "MS")}
    assert len(units) > 10
    assert [name for name, unit in units.items() if not name.endswith("-s" if unit == "SECONDS" else "-ms")] == []


def test_help_names_the_commands() -> None:
    found = slipstream("--help")
    assert found.returncode == 0
    commands = typer.main.get_group(app).commands
    named = {
        "up",
        "generate",
        "jobs",
        "watch",
        "cancel",
        "status",
        "health",
        "doctor",
        "trace",
        "demo",
        "check-drafter",
    }
    assert named <= commands.keys()
    for name, command in commands.items():
        assert f"\n  {name} " in found.stdout
        own = CliRunner().invoke(app, [name, "--help"])
        assert own.exit_code == 0
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        assert [option for option in options if f"  {option} " not in own.stdout] == []


def test_help_has_the_options_under_headings() -> None:
    shown = slipstream("up", "--help").stdout
    heading, found = "", dict[str, str]()
    for line in shown.splitlines():
        heading = line.removesuffix(":") if line.endswith(":") and not line.startswith(" ") else heading
        if line.startswith("  --"):
            found[line.split()[0]] = heading
    wanted = {"--verbose": "Options", "--target": "Models", "--listen": "Server", "--slots": "Steps and memory"}
    wanted |= {"--queue": "Requests and jobs", "--device": "Computing", "--log-level": "Logs"}
    assert {option: found[option] for option in wanted} == wanted


def test_the_version_of_the_command_is_the_package_s() -> None:
    found = slipstream("--version")
    assert (found.returncode, found.stdout) == (0, f"slipstream {version('slipstream-serve')}\n")


def test_the_shell_completes_commands_and_options() -> None:
    for words, expected in (("slipstream sta", "status"), ("slipstream up --slo", "--slots")):
        asked = {"_SLIPSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        program = Path(sys.executable).with_name("slipstream")
        found = subprocess.run(program, env=os.environ | asked, capture_output=True, text=True, timeout=30, check=False)
        assert found.stdout.split() == [expected]


WRONG = {
    "up --target {}/model --device tpu": "--device: got 'tpu'",
    "up --target {}/none": "--target: got '{}/none'",
    "up --no-such-option": "--no-such-option",
    "up --slots many": "'--slots'",
    "up --config {}/none": "--config: got '{}/none', accepted: a file in YAML that this user can read",
    "generate x --server here": "--server: got 'here'",
    "generate x --json-schema {}/none": "--json-schema: got '{}/none', accepted: a file of text",
    "generate x --grammar {}": "--grammar: got '{}', accepted: a file of text",
    "generate x --connect-timeout-s 0": "--connect-timeout-s: got 0.0",
    "status --server here:http": "--server: got 'here:http'",
    "status --interval-s 1": "--interval-s: got 1.0, accepted: a number with --watch",
    **{f"status --watch --interval-s {given}": "--interval-s: got " for given in ("0", "-1", "nan", "1e9")},
    **{f"check-drafter --address unix:/none --timeout-s {given}": "--timeout-s: got " for given in ("0", "nan", "inf")},
    "bench --output {}": "--output: got '{}', accepted: a file in a folder that exists",
    "doctor --device tpu": "--device: got 'tpu'",
    "demo --device abacus": "--device: got 'abacus', accepted: auto, cpu, cuda",
    "health verify": "ADDRESS: got 'verify', accepted: HOST:PORT",
    **{
        f"trace --steps {given} {{}}/out": f"--steps: got {given}, accepted: 1 to 1000" for given in ("0", "-1", "1001")
    },
    **{f"trace --wait-s {given} {{}}/out": "--wait-s: got " for given in ("0", "-1", "nan", "inf", "61")},
    "trace {}": "OUT: got '{}', accepted: a file that this user can ",
    "trace {}/missing/out.json": "OUT: got '{}/missing/out.json', accepted: a file that this user can ",
    "trace {}/model/config.json/out": "OUT: got '{}/model/config.json/out', accepted: a file that this user can ",
}
"""Commands that are wrong, and what they are told; {} is a folder."""
FAILED = {
    "trace --state-dir {}/state {}/out": "no `slipstream up` is ready in {}/state",
    "status --server {here}": "no answer from a server at {here}",
}


@pytest.mark.parametrize(("command", "message"), (WRONG | FAILED).items())
def test_a_command_that_cannot_be_done_is_one_clear_line(command: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with unserved_address() as here:
        command, message = (text.replace("{here}", here).replace("{}", str(tmp_path)) for text in (command, message))
        found = slipstream(*command.split())
    assert (found.returncode, found.stdout) == (1 if "no " in message else 2, "")
    lines = found.stderr.splitlines()
    assert message in lines[-1]
    assert len(lines) == 1 or lines[0].startswith("Usage: ")
    assert not (tmp_path / "out").exists()
    assert ("`slipstream up` starts one" in found.stderr) == ("--server " + here in command)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_that_is_no_utf_8_is_refused_by_name(errors: str) -> None:
    command = (sys.executable, "-m", "slipstream.cli.main", "generate", "-")
    environment = os.environ | {"PYTHONIOENCODING": f"utf-8:{errors}"}
    found = subprocess.run(command, input=b"\xff", env=environment, capture_output=True, timeout=30, check=False)
    assert found.returncode == 2
    (line,) = found.stderr.decode().splitlines()
    assert line.startswith("slipstream: error: PROMPT: got ")
    assert line.endswith("accepted: text in UTF-8")


def test_a_state_directory_that_no_server_can_have_is_one_line() -> None:
    command = (sys.executable, "-m", "slipstream.cli.main", "status", "--state-dir", f"/{'x' * 150}")
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 1
    assert found.stderr == f"slipstream: error: no `slipstream up` is ready in /{'x' * 150}\n"


def test_generate_gives_up_a_server_that_never_answers() -> None:
    with unserved_address() as address:
        found = slipstream("generate", "--server", address, "--connect-timeout-s", "0.3", "Hello")
    assert found.returncode == 1
    note, error = found.stderr.splitlines()
    assert note == f"slipstream: no answer yet: trying {address} for 0.3 s"
    assert error.startswith(f"slipstream: error: no answer from a server at {address}: ")
    assert "refused" in error


def test_authorities_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("no certificate")
    found = slipstream("generate", "--server", "127.0.0.1:1", "--tls-ca", str(path), "Hello")
    assert found.returncode == 2
    assert found.stderr.startswith(f"slipstream: error: --tls-ca: got '{path}', accepted: a file with certificates")
    assert found.stderr.count("\n") == 1


def test_up_refuses_a_port_in_use(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = slipstream("up", "--target", str(tmp_path), "--state-dir", str(tmp_path / "state"), "--listen", address)
    assert found.returncode == 2
    accepted = "an address at which no other process serves"
    assert found.stderr == f"slipstream: error: --listen: got '{address}', accepted: {accepted}\n"


@pytest.mark.parametrize(
    ("file", "given"),
    [("nobody", "{}, line 1'"), ("# none", "{}'"), (None, "{}'")],
    ids=["malformed", "empty", "missing"],
)
def test_up_refuses_a_wrong_file_of_keys_before_anything_starts(tmp_path: Path, file: str | None, given: str) -> None:
    (tmp_path / "config.json").touch()
    keys, state_dir = tmp_path / "keys", tmp_path / "state"
    if file is not None:
        keys.write_text(file)
    options = ("--state-dir", str(state_dir), "--listen", "127.0.0.1:0", "--api-keys", str(keys))
    found = slipstream("up", "--target", str(tmp_path), *options)
    assert found.returncode == 2
    assert found.stderr.startswith(f"slipstream: error: --api-keys: got '{given.format(keys)}, accepted: ")
    assert found.stderr.count("\n") == 1
    assert not state_dir.exists()


@pytest.mark.parametrize(("number", "service"), [(0, "scheduler"), (1, "verify"), (3, "gateway")])
def test_up_names_the_first_metrics_port_in_use(tmp_path: Path, number: int, service: str) -> None:
    (tmp_path / "config.json").touch()
    first = free_ports(4)
    options = ("--state-dir", str(tmp_path / "state"), "--listen", "127.0.0.1:0", "--metrics-port", str(first))
    with ExitStack() as held:
        # As beside another `up`, whose ports follow each other.
        for port in range(first + number, first + 4):
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        found = slipstream("up", "--target", str(tmp_path), *options)
    accepted = f"a port that is free, as those after it; another process serves at {first + number}, for {service}"
    message = f"slipstream: error: --metrics-port: got {first}, accepted: {accepted}\n"
    assert (found.returncode, found.stderr) == (2, message)
