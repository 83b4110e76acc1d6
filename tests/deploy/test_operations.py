"""docs/operations.md: every command, option, panel and alert that it names is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path

import pytest
import typer.main

from slipstream.cli.main import app
from slipstream.gateway.main import gateway
from slipstream.scheduler.main import scheduler
from slipstream.services.command_line import draft, verify
from slipstream.services.grammar_main import grammar
from tests.deploy.dashboard_queries import DEPLOY, alert_rules, boards, panels_of

PAGE = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
SERVICES: dict[str, Callable[..., None]] = {
    "slipstream-gateway": gateway,
    "slipstream-scheduler": scheduler,
    "slipstream-draft": draft,
    "slipstream-verify": verify,
    "slipstream-grammar": grammar,
}
SECTIONS = {f"Slipstream: {name}": name.capitalize() for name in ("overlap", "speculation", "service", "health")}
"""The chapter about each dashboard."""
ELSEWHERE = {"--profile", "--build", "--help", "--install-completion"}
"""Options of docker compose, of every command, and of `slipstream` itself."""
EMPHASIS = {"Ready"}
"""In italics, and no panel."""


def options_of(name: str) -> set[str]:
    """Returns the options of a command such as `slipstream up` or `slipstream-draft`."""
    if name in SERVICES:
        service = typer.Typer()
        service.command()(SERVICES[name])
        command = typer.main.get_command(service)
    else:
        command = typer.main.get_group(app).commands[name.removeprefix("slipstream ")]
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


COMMANDS = [*SERVICES, *(f"slipstream {name}" for name in typer.main.get_group(app).commands)]


def test_commands_are_there() -> None:
    named = set(re.findall(r"`(slipstream [a-z][a-z-]*)", PAGE)) | set(
        re.findall(r"^(slipstream[ -][a-z-]+)", PAGE, re.MULTILINE)
    )
    assert named
    assert sorted(named - set(COMMANDS)) == []


def test_options_are_there() -> None:
    every = set().union(*map(options_of, COMMANDS))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert sorted(named - every - ELSEWHERE) == []


def test_a_command_has_the_options_that_it_is_named_with() -> None:
    lines = PAGE.replace("\\\n", " ").splitlines()
    calls = [call for line in lines for call in re.findall(r"(?:^|`)(slipstream(?:-| )[a-z]+[^`]*)", line)]
    checked = 0
    for call in calls:
        command = next((name for name in COMMANDS if call == name or call.startswith(f"{name} ")), None)
        given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", call))
        if command is not None:
            assert sorted(given - options_of(command)) == [], call
            checked += len(given)
    assert checked >= 8


def test_panels_are_called_as_on_the_dashboards() -> None:
    titles = {panel.title for board in boards().values() for panel in panels_of(board)}
    assert all(title[0].isupper() for title in titles)
    named = {name.replace("\n", " ") for name in re.findall(r"(?<![\w*])\*([A-Z][^*]*)\*(?![\w*])", PROSE)}
    assert sorted(named - titles - EMPHASIS) == []


@pytest.mark.parametrize("title", SECTIONS)
def test_every_dashboard_has_its_chapter(title: str) -> None:
    board = next(board for board in boards().values() if board["title"] == title)
    chapter = PAGE.split(f"\n### {SECTIONS[title]}\n")[1].split("\n## ")[0].split("\n### ")[0]
    named = set(re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", chapter))
    assert named & {panel.title for panel in panels_of(board)}
    assert "pictures/" in chapter


def test_every_alert_has_one_paragraph_and_every_paragraph_its_alert() -> None:
    chapter = PAGE.split("\n## Alerts\n")[1].split("\n## ")[0]
    assert re.findall(r"^### (\w+)$", chapter, re.MULTILINE) == [rule.place for rule in alert_rules()]


def test_the_unit_of_systemd_starts_what_there_is(tmp_path: Path) -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "slipstream.service", encoding="utf-8")
    service = unit["Service"]
    (tmp_path / "up.yaml").write_text("slots: 4\n", encoding="utf-8")
    program, name, *words = service["ExecStart"].replace("/etc/slipstream/up.yaml", f"{tmp_path}/up.yaml").split()
    assert (Path(program).name, name) == ("slipstream", "up")
    given = typer.main.get_group(app).commands["up"].make_context(name, words).params
    assert given["slots"] == 4
    assert given["state_dir"] == Path("/var/lib") / service["StateDirectory"]
    assert float(service["TimeoutStopSec"]) > given["drain_timeout_s"] + 10
    assert float(service["TimeoutStartSec"]) > given["ready_timeout_s"]
    assert service["User"] in PAGE
