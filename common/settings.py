"""Settings, each declared once: from a field's metadata come its check, its command-line option and a child's argument.

@dataclass(frozen=True, kw_only=True)
class ServerConfig(Settings):
    slots: int = setting(16, help="Requests that run at the same time.", low=1, high=4096)

@with_options(ServerConfig)
def serve(**values): ...                  # a typer command with the option `--slots N`

arguments(ServerConfig(slots=5))          # ["--slots", "5"]
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
import typer.core

from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

T = TypeVar("T")

_SPEC = "setting"
HELP_WIDTH = {"max_content_width": 100, "help_option_names": ["-h", "--help"]}
"""Context settings of a command: its help is as wide as the terminal, up to this."""
VARIABLE_PREFIX = "SLIPSTREAM_"
"""Begins the environment variable of each option: --num-slots is SLIPSTREAM_NUM_SLOTS."""


@dataclass(frozen=True, kw_only=True)
class _Spec:
    help: str
    unit: str | None
    unset: str | None
    parse: Callable[[str], Any] | None
    accepts: Callable[[Any], bool] | None
    accepted: str

    def check(self, name: str, value: object) -> None:
        if value is not None and self.accepts is not None and not self.accepts(value):
            raise ConfigError(name, str(value) if isinstance(value, Path) else value, self.accepted)


def setting(
    default: object = MISSING,
    *,
    help: str,
    unit: str | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    accepts: Callable[[Any], bool] | None = None,
    accepted: str = "",
    unset: str | None = None,
    parse: Callable[[str], Any] | None = None,
    default_factory: Any = MISSING,
) -> Any:
    """A field of a `Settings` dataclass; without a default it must be given.

    `unit` is the placeholder that the help shows for the value ("MS", "DIR"). A value is accepted from `low`, or only
    `above` a bound, to `high`; or if it is one of `choices`; or if `accepts` says so, which `accepted` puts in words.
    None, where it is the default, is always accepted; `unset` says what it stands for. `parse` reads the value from the
    command line, and raises ValueError.
    """
    if choices:
        accepts, accepted = accepts or choices.__contains__, accepted or ", ".join(choices)
        unit = "|".join(choices)
    elif high is not None:
        assert (low is None) != (above is None), "a range has one lower end"
        accepts = (lambda value: above < value <= high) if low is None else (lambda value: low <= value <= high)
        accepted = accepted or (f"above {above}, to {high}" if low is None else f"{low} to {high}")
    spec = _Spec(help=help, unit=unit, unset=unset, parse=parse, accepts=accepts, accepted=accepted)
    return field(default=default, default_factory=default_factory, metadata={_SPEC: spec})


def duration(default: float, *, help: str) -> Any:
    """A setting of a time in seconds: above 0, to a day."""
    return setting(default, help=help, unit="SECONDS", above=0, high=86400)


class Settings:
    """Base of frozen dataclasses whose fields are settings. Raises ConfigError, naming the field, when it is built."""

    heading = "Options"
    """Above the options of a class's own fields, in the help of a command."""

    def __init_subclass__(cls, *, heading: str = "Options") -> None:
        cls.heading = heading

    def __post_init__(self) -> None:
        """Checks each setting by itself."""
        for member, spec in _settings(type(self)):
            spec.check(member.name, getattr(self, member.name))


def _settings(kind: type) -> Iterator[tuple[Field[Any], _Spec]]:
    """The fields that are settings, in the order of their declaration."""
    for member in fields(kind):
        if _SPEC in member.metadata:
            yield member, member.metadata[_SPEC]


def shared(kind: type[T], values: object, **more: Any) -> T:
    """Builds settings of `kind`: those in `more`, and the others that `values`, a mapping or other settings, has."""
    names = [member.name for member in fields(kind) if member.name not in more]  # type: ignore[arg-type]
    given: Mapping[str, Any] = values if isinstance(values, dict) else vars(values)
    return kind(**{name: given[name] for name in names if name in given}, **more)


def checked(kind: type, values: Mapping[str, Any]) -> None:
    """Checks some settings of `kind`, each by itself. Raises ConfigError."""
    for member, spec in _settings(kind):
        spec.check(member.name, values.get(member.name))


def with_options(
    *kinds: type, only: Container[str] | None = None, without: Container[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a typer command, in place of its `**values`, an option for each setting of `kinds`, or some of them."""

    def is_wanted(name: str) -> bool:
        return name not in without and (only is None or name in only)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(command, eval_str=True).parameters.values()
        own = [one.replace(kind=one.KEYWORD_ONLY) for one in given if one.kind is not one.VAR_KEYWORD]
        made = {one.name: one for kind in kinds for one in _parameters(kind) if is_wanted(one.name)}
        command.__signature__ = inspect.Signature([*own, *made.values()])  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in [*own, *made.values()]}
        return command

    return decorate


def read_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Takes the values of options from a YAML file, where neither the command line nor a variable has one.

    Called with the value of an option that is read before all others. Raises ConfigError for a file that is no mapping
    of the command's options.
    """
    if path is None:
        return None
    import yaml

    try:
        # Scalars stay texts, as on the command line: `off` is no false, and 010 no 8.
        found = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError("config", str(path), f"a file in YAML that this user can read ({error})") from error
    names = {one.name for one in context.command.params}
    if not isinstance(found, dict):
        raise ConfigError("config", str(path), "a file with a line `option: value` for each option")
    values = {str(name).replace("-", "_"): value for name, value in found.items()}
    for name, value in values.items():
        if name not in names:
            raise ConfigError("config", f"{name} in {path}", "options of this command, without their --")
        if isinstance(value, dict) or not value:
            raise ConfigError("config", f"{name}: {value or ''} in {path}", "a value after the colon")
    context.default_map = values
    return path


class GroupedCommand(typer.core.TyperCommand):
    """Shows in its help the options of each kind of settings under that kind's heading."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            is_argument = isinstance(parameter, typer.core.TyperArgument)
            heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _parameters(kind: type) -> Iterator[inspect.Parameter]:
    """The options of a kind of settings: those of its own fields, then those of each class that it inherits from."""
    hints, classes = get_type_hints(kind), kind.__mro__
    places = {name: place for place, one in enumerate(classes) for name in inspect.get_annotations(one)}
    for member, spec in sorted(_settings(kind), key=lambda setting: places[setting[0].name]):
        default = member.default_factory() if member.default_factory is not MISSING else member.default
        option = typer.Option(
            _option_name(member),
            parser=spec.parse,
            envvar=VARIABLE_PREFIX + member.name.upper(),
            show_envvar=False,
            metavar=None if hints[member.name] is bool else spec.unit,
            help=f"{spec.help}  [default: {spec.unset}]" if spec.unset else spec.help,
            rich_help_panel=getattr(classes[places[member.name]], "heading", None),
        )
        default = inspect.Parameter.empty if default is MISSING else default
        yield inspect.Parameter(
            member.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[hints[member.name], option],
        )


def arguments(settings: object) -> list[str]:
    """The words of a command line that say what differs from the defaults."""
    words: list[str] = []
    for member, _spec in _settings(type(settings)):
        value = getattr(settings, member.name)
        if value != member.default:
            words += [_option_name(member)] if value is True else [_option_name(member), str(value)]
    return words


def _option_name(member: Field[Any]) -> str:
    return "--" + member.name.replace("_", "-")
