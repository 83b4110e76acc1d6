"""`slipstream`: the command line. A command's own imports are made when it runs, so that none is slow to start."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from slipstream.cli.models import ModelOptions
from slipstream.cli.options import (
    BenchOptions,
    ConnectionOptions,
    GenerateOptions,
    JobArgument,
    JsonOption,
    JsonOutputOption,
    StateDirOption,
    naming_options,
)
from slipstream.cli.state_dir import default_state_dir
from slipstream.cli.swap_draft import SwapOptions, run_swap
from slipstream.cli.up_config import UpConfig, first_metrics_port
from slipstream.common.errors import (
    CheckpointError,
    ConfigError,
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    SlipstreamError,
    UnauthenticatedError,
)
from slipstream.common.rpc.shutdown import log_failure
from slipstream.common.settings import HELP_WIDTH, GroupedCommand, checked, read_defaults, shared, with_options
from slipstream.services.worker.config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True,
    context_settings=HELP_WIDTH,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_command = partial(app.command, cls=GroupedCommand)

_HINTS: dict[type[SlipstreamError], str] = {
    ConnectionLostError: " (`slipstream up` starts one; --server names another; --tls or --tls-ca reach one with TLS)",
    UnauthenticatedError: " (--api-key TOKEN, or the variable SLIPSTREAM_API_KEY)",
}
"""Advice for the user by kind of error, in the terms of the command line."""


def main() -> None:
    """Runs the command line: exit status 0 when all went well, 1 after a failure, 2 for a wrong command or model."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # what it calls INFO would stand among our own lines
    try:
        app()
    except (CheckpointError, ConfigError, InvalidArgumentError) as error:
        _fail(error, 2)
    except (SlipstreamError, OSError) as error:
        _fail(error, 1)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"slipstream {version('slipstream-serve')}")
        raise typer.Exit


@app.callback()
def _slipstream(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serves language models with speculative decoding, as a gateway, a scheduler, a draft and a verify service."""


@_command()
@with_options(ModelOptions, UpConfig)
def up(
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the services log.")] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            callback=read_defaults,
            is_eager=True,
            envvar="SLIPSTREAM_CONFIG",
            show_envvar=False,
            help="A YAML file with a line `option: value` for each option. The command line comes before the variables "
            "of the environment, as SLIPSTREAM_SLOTS for --slots, and these come before the file.",
        ),
    ] = None,
    **values: Any,
) -> None:
    """Start all four services here, and stop them on Ctrl-C. One that dies or hangs is started again.

    Ctrl-C lets running requests finish; a second one does not wait for them.
    """
    config = shared(UpConfig, values, models=shared(ModelOptions, values).choose())
    from slipstream.cli.up import run_up

    _exit_with(run_up(config, is_verbose=verbose))


@_command()
@with_options(GenerateOptions, ConnectionOptions)
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    as_json: JsonOutputOption = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Print only the job's name; `slipstream watch NAME` has the output.")
    ] = False,
    **values: Any,
) -> None:
    """Continue a prompt, and print the text as it arrives. Ctrl-C cancels the job."""
    from slipstream.cli.jobs import run_generate

    options, connection = shared(GenerateOptions, values), shared(ConnectionOptions, values)
    if options.logprobs is not None and not as_json and not detach:
        raise ConfigError("logprobs", options.logprobs, "a number with --json")
    text = prompt
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:  # by the locale, what is no UTF-8 is found when it is read, or arrives as surrogates
        raise ConfigError("PROMPT", text, "text in UTF-8") from None
    with naming_options():
        _exit_with(run_generate(connection, options, text, as_json=as_json, detach=detach))


@_command()
@with_options(ConnectionOptions)
def jobs(
    limit: Annotated[int, typer.Option(metavar="N", help="Most jobs to list, 1 to 1000.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each job.")] = False,
    **values: Any,
) -> None:
    """List the jobs that wait, run, or ended not long ago, the latest first."""
    from slipstream.cli.jobs import run_jobs

    _exit_with(run_jobs(shared(ConnectionOptions, values), limit, as_json=as_json))


@_command()
@with_options(ConnectionOptions)
def watch(
    job_id: JobArgument,
    from_token: Annotated[
        int, typer.Option(metavar="N", help="Number of tokens to leave out at the beginning of each output.")
    ] = 0,
    as_json: JsonOutputOption = False,
    **values: Any,
) -> None:
    """Print a job's output as it arrives, from the beginning. Ctrl-C leaves the job as it is."""
    from slipstream.cli.jobs import run_watch_job

    with naming_options("from_token"):
        _exit_with(run_watch_job(shared(ConnectionOptions, values), job_id, from_token, as_json=as_json))


@_command()
@with_options(ConnectionOptions)
def cancel(job_id: JobArgument, **values: Any) -> None:
    """End a job, in any state. No effect on one that is over."""
    from slipstream.cli.jobs import run_cancel

    _exit_with(run_cancel(shared(ConnectionOptions, values), job_id))


@_command()
@with_options(ConnectionOptions)
def status(
    state_dir: StateDirOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --watch one for each interval, on a line.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it repeatedly, with what happened since.")] = False,
    interval_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --watch: time between two updates.  [default: 1]")
    ] = None,
    **values: Any,
) -> None:
    """Show the services, and whether they are healthy. Fails when one is not; a missing draft does not count.

    Shows each service's process id, restarts, address, health and model; with --watch also where the time of steps
    goes, what drafting gains, and what requests get, until Ctrl-C.
    """
    from slipstream.cli.status import run_status, run_watch

    connection = shared(ConnectionOptions, values)
    if watch:
        _exit_with(run_watch(connection, state_dir, interval_s=interval_s, as_json=as_json))
    if interval_s is not None:
        raise ConfigError("interval_s", interval_s, "a number with --watch")
    _exit_with(run_status(connection, state_dir, as_json=as_json))


@_command()
@with_options(SwapOptions)
def swap_draft(
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="State directory of the running `slipstream up`.  [default: as of `up`]"),
    ] = None,
    as_json: JsonOption = False,
    **values: Any,
) -> None:
    """Change the draft while requests run. Fails when the new draft is rolled back.

    A new draft service is started beside the old one, catches up, takes over, and is judged; the loser is ended.
    """
    options = shared(SwapOptions, values)
    with naming_options("draft", "algorithm", "num_draft_tokens"):
        _exit_with(run_swap(options, default_state_dir() if state_dir is None else state_dir, as_json=as_json))


@_command()
@with_options(ConnectionOptions)
def trace(
    out: Annotated[str, typer.Argument(metavar="OUT", help="File to write; - is standard output.")],
    state_dir: StateDirOption = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Number of steps, from the next one on.")] = 50,
    wait_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest wait for a further complete step, before giving up.")
    ] = 10.0,
    **values: Any,
) -> None:
    """Write a timeline of the next steps of all services.

    OUT is for https://ui.perfetto.dev or chrome://tracing. Nothing is switched on for it: requests must run. If they
    end before, the steps so far are written.
    """
    from slipstream.cli.status import located
    from slipstream.cli.trace import run_trace

    _exit_with(run_trace(located(shared(ConnectionOptions, values), state_dir), steps, wait_s, out))


@_command()
@with_options(BenchOptions, ConnectionOptions)
def bench(**values: Any) -> None:
    """Load a running server, and print latencies and rates. Fails when a request did.

    Outputs have the length that is asked for, past the model's end of sequence.
    """
    options = shared(BenchOptions, values)
    from slipstream.cli.bench import run_bench

    _exit_with(run_bench(shared(ConnectionOptions, values), options))


@_command()
@with_options(ConnectionOptions, without=("server", "api_key"))
def health(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT, or unix:PATH, of any one service.")],
    kill_hung: Annotated[
        bool, typer.Option("--kill-hung", help="Kill the process at unix:PATH if it answers nothing for 8 s.")
    ] = False,
    **values: Any,
) -> None:
    """Ask a service whether it serves. Ends with 0 if it says SERVING, else with 1."""
    from slipstream.cli.health import check, check_or_kill
    from slipstream.common.rpc.address import parse_address

    parsed = str(parse_address(address, field="ADDRESS"))
    access = shared(ConnectionOptions, values).access
    found = _run(check_or_kill(parsed) if kill_hung else check(parsed, **access))
    if found != "SERVING":
        raise FailedPreconditionError(f"{address} says {found}")
    print(found)


@_command()
@with_options(
    ModelOptions, UpConfig, only=("target", "draft", "algorithm", "device", "listen", "metrics_port", "state_dir")
)
def doctor(as_json: JsonOption = False, **values: Any) -> None:
    """Check whether this host can serve. Fails when something is missing.

    It also measures how fast two processes hand over here.
    """
    from slipstream.cli.doctor import run_doctor
    from slipstream.common.rpc.address import parse_address

    checked(UpConfig, values)
    parse_address(values["listen"], field="listen")
    models = shared(ModelOptions, values).choose(may_download=False)
    listen, metrics_port = values["listen"], first_metrics_port(values["metrics_port"], values["listen"])
    _exit_with(run_doctor(models, values["device"], listen, metrics_port, values["state_dir"], as_json=as_json))


@_command()
@with_options(WorkerConfig, only=("device",))
def check_drafter(
    address: Annotated[str, typer.Option(metavar="unix:PATH", help="Where the drafter serves.")],
    timeout_s: Annotated[float, typer.Option(metavar="SECONDS", help="What a step or an answer may take.")] = 10.0,
    **values: Any,
) -> None:
    """Check a drafter of your own, without a model. Fails when it breaks the contract.

    It is driven as by scheduler and verify. A line for each check says what is broken. The drafter must have no
    scheduler.
    """
    from slipstream.common.rpc.address import parse_address

    parsed = str(parse_address(address, field="address"))
    if not 0 < timeout_s <= 86400:
        raise ConfigError("timeout_s", timeout_s, "above 0, to 86400")
    from slipstream.cli.check_drafter import run_check_drafter

    raise typer.Exit(run_check_drafter(parsed, values["device"], timeout_s=timeout_s))


@_command()
@with_options(WorkerConfig, only=("algorithm", "device"))
def demo(**values: Any) -> None:
    """Watch the bundled models serve, with and without drafting."""
    from slipstream.cli.demo import run_demo

    checked(WorkerConfig, values)
    _exit_with(run_demo(**values))


def _exit_with(work: Coroutine[object, object, int]) -> None:
    raise typer.Exit(_run(work))


def _run(work: Coroutine[object, object, T]) -> T:
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(log_failure)
        return runner.run(work)


def _fail(error: Exception, status: int) -> None:
    message = str(error) + next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), "")
    if isinstance(error, ConfigError):
        is_argument = error.field.isupper()
        option = error.field if is_argument else "--" + error.field.replace("_", "-")
        message = option + message.removeprefix(error.field)
    print(f"slipstream: error: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
