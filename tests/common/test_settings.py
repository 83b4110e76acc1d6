"""Settings: their checks, their command-line options, and the arguments for a child process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from slipstream.common.errors import ConfigError
from slipstream.common.settings import (
    HELP_WIDTH,
    Settings,
    arguments,
    checked,
    read_defaults,
    setting,
    shared,
    with_options,
)


@dataclass(frozen=True, kw_only=True)
class Basic(Settings):
    """A base whose settings others have, too."""

    slots: int = setting(16, help="Rows.", unit="N", low=1, high=64)
    kind: str = setting("a", help="Which.", choices=("a", "b"))


@dataclass(frozen=True, kw_only=True)
class Switched(Settings):
    """Settings whose values YAML has other readings of."""

    mode: str = setting("auto", help="Whether.", choices=("auto", "on", "off"))
    count: int = setting(1, help="Number.", unit="N", low=1, high=99)
    loud: bool = setting(True, help="Says more.")


@dataclass(frozen=True, kw_only=True)
class Full(Basic):
    """One of each sort."""

    where: Path = setting(help="Folder.", unit="DIR", accepts=Path.is_dir, accepted="a directory")
    limit_s: float | None = setting(None, help="Time.", unit="SECONDS", above=0, high=60, unset="for ever")
    loud: bool = setting(False, help="Says more.")
    texts: list[str] | None = setting(None, help="Texts.", unit="TEXT")
    made: object = None


def parsed(*words: str) -> tuple[Any, str]:
    """Returns the settings that a command gets for these words, and its output."""
    got: list[Full] = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @with_options(Full)
    def command(own: int = 3, **values: Any) -> None:
        got.append(Full(**values, made=own))

    result = CliRunner().invoke(app, words)
    return (got[0] if got else result.exception), result.output


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("slots", {"slots": 0}),
        ("slots", {"slots": 65}),
        ("kind", {"kind": "c"}),
        ("where", {"where": Path(__file__, "none")}),
        ("limit_s", {"limit_s": 0}),
        ("limit_s", {"limit_s": float("nan")}),
        ("limit_s", {"limit_s": float("inf")}),
    ],
)
def test_a_wrong_setting_is_named(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: got .*, accepted: "):
        Full(**{"where": Path("/"), **values})
    with pytest.raises(ConfigError, match=f"^{name}: "):
        checked(Full, values)


def test_options_become_settings_and_arguments_again() -> None:
    words = ["--slots", "5", "--where", "/tmp", "--limit-s", "2.5", "--loud", "--own", "4"]
    config, _ = parsed(*words)
    assert config == Full(slots=5, where=Path("/tmp"), limit_s=2.5, loud=True, made=4)
    assert arguments(config) == words[:-2]
    assert parsed("--where", "/", "--texts", "a", "--texts", "b")[0] == Full(where=Path("/"), texts=["a", "b"], made=3)


def test_help_has_units_and_defaults() -> None:
    text = " ".join(parsed("--help")[1].split())
    for part in (
        "--slots N Rows. [default: 16]",
        "--kind a|b Which. [default: a]",
        "--where DIR Folder. [required]",
        "--limit-s SECONDS Time. [default: for ever]",
        "--loud Says more.",
    ):
        assert part in text
    assert "made" not in text


def test_some_options_only() -> None:
    @with_options(Full, only=("slots", "kind"), without=("kind",))
    def command(**values: Any) -> None:
        """Has one option."""

    app = typer.Typer(add_completion=False)
    app.command()(command)
    assert [parameter.name for parameter in typer.main.get_command(app).params] == ["slots"]


def test_shared_settings_are_passed_on() -> None:
    assert shared(Full, Basic(slots=3), where=Path("/")) == Full(slots=3, where=Path("/"))
    assert shared(Basic, {"slots": 2, "other": 1}) == Basic(slots=2)


def test_the_command_line_comes_before_variables_and_these_before_the_file(tmp_path: Path) -> None:
    got: list[Full] = []
    app = typer.Typer(rich_markup_mode=None, context_settings=HELP_WIDTH)

    @app.command()
    @with_options(Full)
    def command(
        config: Annotated[Path | None, typer.Option(callback=read_defaults, is_eager=True)] = None, **values: Any
    ) -> None:
        got.append(Full(**values))

    file = tmp_path / "a.yaml"
    file.write_text(f"slots: 1\nlimit-s: 2.5\nloud: true\ntexts: [a, b]\nwhere: {tmp_path}\n", encoding="utf-8")

    def run(*words: str, **variables: str) -> Full:
        CliRunner().invoke(app, ["--config", str(file), *words], env=variables, catch_exceptions=False)
        return got[-1]

    assert run() == Full(slots=1, limit_s=2.5, loud=True, texts=["a", "b"], where=tmp_path)
    assert run(SLIPSTREAM_SLOTS="2", SLIPSTREAM_KIND="b").slots == 2
    assert run(SLIPSTREAM_SLOTS="2", SLIPSTREAM_KIND="b").kind == "b"
    assert run("--slots", "3", SLIPSTREAM_SLOTS="2").slots == 3
    for text, message in (
        ("slot: 1", f"config: got 'slot in {file}', accepted: options of this command, without their --"),
        ("- slots", f"config: got '{file}', accepted: a file with a line `option: value` for each option"),
        ("a: [", f"config: got '{file}', accepted: a file in YAML that this user can read"),
        ("[" * 10_000, f"config: got '{file}', accepted: a file in YAML that this user can read"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=re.escape(message)):
            run()
    for text in ("slots:", "slots: {a: 1}"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"accepted: a value after the colon"):
            run()
    assert "--slots N" in CliRunner().invoke(app, ["-h"]).output


def test_values_in_the_file_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    got: list[Switched] = []
    app = typer.Typer()

    @app.command()
    @with_options(Switched)
    def command(
        config: Annotated[Path | None, typer.Option(callback=read_defaults, is_eager=True)] = None, **values: Any
    ) -> None:
        got.append(Switched(**values))

    file = tmp_path / "a.yaml"
    for text in ("mode: off\ncount: 010\nloud: false\n", 'mode: "off"\ncount: "10"\nloud: "no"\n'):
        file.write_text(text, encoding="utf-8")
        CliRunner().invoke(app, ["--config", str(file)], catch_exceptions=False)
        assert got.pop() == Switched(mode="off", count=10, loud=False)
