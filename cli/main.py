"""`slipstream`: the command line. A command's own imports are made when it runs, so that none is slow to start."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path  # noqa: TC003 — typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import request_options as of_request  # noqa: TC001 — as above
from slipstream.cli.model_choice import ALGORITHMS, ModelChoice
from slipstream.cli.up_config import DEFAULT_SERVER, METRICS_PORT, UpConfig, default_state_dir
from slipstream.common.errors import ConfigError, FailedPreconditionError, InvalidArgumentError, SlipstreamError
from slipstream.common.rpc.logs import FORMATS, LEVELS
from slipstream.scheduler.config import FENCES
from slipstream.services.worker.config import ALGORITHMS as WORKER_ALGORITHMS
from slipstream.services.worker.config import DEVICES, DTYPES, LOAD_FORMATS, WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from slipstream.client.requests import RequestOptions

app = typer.Typer(
    help="Serves large language models with speculative decoding, as a scheduler, a draft and a verify service.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ServerOption = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.")]


def main() -> None:
    """Runs the command line: 0 when all went well, 1 when something did not, 2 when the command was wrong."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # what it calls INFO would stand among our own lines
    try:
        app()
    except (ConfigError, InvalidArgumentError) as error:
        _fail(error, 2)
    except SlipstreamError as error:
        _fail(error, 1)


@app.command()
def up(
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the target model.  [default: the bundled one]")
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the draft model.  [default: the bundled one for its target]"),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(ALGORITHMS), help="How drafts are made.  [default: none for a --target without --draft]"
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(metavar="K", help=f"Tokens drafted in a step.  [default: {ModelChoice.num_draft_tokens}]"),
    ] = None,
    run_ahead: Annotated[
        int, typer.Option(metavar="R", help="Steps sent before the result of the first is known.")
    ] = UpConfig.run_ahead,
    device: Annotated[str, typer.Option(metavar="|".join(DEVICES), help="What computes.")] = UpConfig.device,
    fence: Annotated[
        str, typer.Option(metavar="|".join(FENCES), help="How streams wait for each other on a GPU.")
    ] = UpConfig.fence,
    mps: Annotated[
        str, typer.Option(metavar="auto|on|off", help="Whether the workers share the GPU under NVIDIA MPS.")
    ] = UpConfig.mps,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads of each worker.  [default: the worker's choice]")
    ] = UpConfig.threads,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(DTYPES), help="What is computed in: bfloat16 on a GPU, float32 on a CPU.")
    ] = UpConfig.dtype,
    load_format: Annotated[
        str, typer.Option(metavar="|".join(LOAD_FORMATS), help="Measuring: dummy has random weights.")
    ] = UpConfig.load_format,
    simulate_accept_length: Annotated[
        float | None,
        typer.Option(metavar="X", help="Measuring: accept drafts by chance, X tokens a step; the output is no text."),
    ] = UpConfig.simulate_accept_length,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a GPU: the same tokens in any batch, with a draft and without.")
    ] = UpConfig.deterministic,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address for clients; port 0 takes a free one.")
    ] = UpConfig.listen,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Prometheus port of the scheduler, on loopback; verify's and draft's are the next two; 0 takes free "
            f"ones.  [default: {METRICS_PORT}, and free ones with port 0 in --listen]",
        ),
    ] = UpConfig.metrics_port,
    log_level: Annotated[str, typer.Option(metavar="|".join(LEVELS), help="What is logged.")] = UpConfig.log_level,
    log_format: Annotated[
        str, typer.Option(metavar="|".join(FORMATS), help="Lines for people, or a JSON object each.")
    ] = UpConfig.log_format,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Directory for sockets and logs.  [default: {default_state_dir()}]"),
    ] = None,
    slots: Annotated[int, typer.Option(metavar="N", help="Requests that run at the same time.")] = UpConfig.slots,
    context_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens of a request, prompt and output together.  [default: what the models allow]"
        ),
    ] = UpConfig.context_tokens,
    kv_memory_mib: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Memory for both KV caches together, in MiB.  [default: 512 on a CPU, on a GPU what is free]",
        ),
    ] = UpConfig.kv_memory_mib,
    page_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens in a KV page.")] = UpConfig.page_tokens,
    queue: Annotated[
        int, typer.Option(metavar="N", help="Requests that may wait; one more is refused.")
    ] = UpConfig.queue,
    chunk_tokens: Annotated[
        int, typer.Option(metavar="N", help="Prompt tokens in one prefill step at most.")
    ] = UpConfig.chunk_tokens,
    stream_interval_ms: Annotated[
        float,
        typer.Option(
            metavar="MS", help="A client gets a message at most this often, and all together one a millisecond."
        ),
    ] = UpConfig.stream_interval_ms,
    kept_jobs: Annotated[
        int, typer.Option(metavar="N", help="Jobs that are kept after their end, to be watched and asked after.")
    ] = UpConfig.kept_jobs,
    job_ttl_s: Annotated[float, typer.Option(metavar="SECONDS", help="How long they are kept.")] = UpConfig.job_ttl_s,
    read_timeout_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="A stream whose client reads nothing for so long is cut off.")
    ] = UpConfig.read_timeout_s,
    ready_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for the models to load.")
    ] = UpConfig.ready_timeout_s,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for running requests to finish when stopped.")
    ] = UpConfig.drain_timeout_s,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the services log.")] = False,
) -> None:
    """Start all three services here, and stop them on Ctrl-C.

    Ctrl-C lets running requests finish; a second one does not wait for them.
    """
    config = UpConfig(
        models=ModelChoice.choose(target=target, draft=draft, algorithm=algorithm, num_draft_tokens=num_draft_tokens),
        run_ahead=run_ahead,
        device=device,
        fence=fence,
        mps=mps,
        threads=threads,
        dtype=dtype,
        load_format=load_format,
        simulate_accept_length=simulate_accept_length,
        deterministic=deterministic,
        listen=listen,
        metrics_port=metrics_port,
        log_level=log_level,
        log_format=log_format,
        state_dir=state_dir or default_state_dir(),
        slots=slots,
        context_tokens=context_tokens,
        kv_memory_mib=kv_memory_mib,
        page_tokens=page_tokens,
        queue=queue,
        chunk_tokens=chunk_tokens,
        stream_interval_ms=stream_interval_ms,
        kept_jobs=kept_jobs,
        job_ttl_s=job_ttl_s,
        read_timeout_s=read_timeout_s,
        ready_timeout_s=ready_timeout,
        drain_timeout_s=drain_timeout,
    )
    from slipstream.cli.up import run_up

    _exit_with(run_up(config, is_verbose=verbose))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    server: ServerOption = DEFAULT_SERVER,
    chat: of_request.Chat = False,
    max_new_tokens: of_request.MaxNewTokens = None,
    min_new_tokens: of_request.MinNewTokens = None,
    temperature: of_request.Temperature = None,
    seed: of_request.Seed = None,
    top_k: of_request.TopK = None,
    top_p: of_request.TopP = None,
    min_p: of_request.MinP = None,
    repetition_penalty: of_request.RepetitionPenalty = None,
    frequency_penalty: of_request.FrequencyPenalty = None,
    presence_penalty: of_request.PresencePenalty = None,
    n: of_request.Samples = None,
    stop: of_request.Stop = None,
    stop_token_id: of_request.StopTokenId = None,
    ignore_eos: of_request.IgnoreEos = False,
    no_speculation: of_request.NoSpeculation = False,
    logprobs: of_request.Logprobs = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line for each output at the end: text, token ids, a report.")
    ] = False,
) -> None:
    """Continue a prompt, and print the text as it comes. Ctrl-C cancels the job."""
    from slipstream.cli.generate import run_generate

    if logprobs is not None and not as_json:
        raise ConfigError("logprobs", logprobs, "a number with --json")
    text = sys.stdin.read() if prompt == "-" else prompt
    options: RequestOptions = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs is not None,
        "top_logprobs": logprobs,
        "speculation": False if no_speculation else None,
    }
    _exit_with(run_generate(server, [{"role": "user", "content": text}] if chat else text, options, as_json=as_json))


@app.command()
def status(
    server: ServerOption = DEFAULT_SERVER,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of the `up` whose server is meant, instead of --server.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --watch one for each interval, on a line.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, with what happened since the time before.")
    ] = False,
    interval: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --watch: time between two looks.  [default: 1]")
    ] = None,
) -> None:
    """Show each service: process, addresses, health, model. Fails when one is not healthy.

    With --watch also where the time of steps goes, what drafting brings, and what requests get, until Ctrl-C.
    """
    from slipstream.cli.server_status import fetch_status
    from slipstream.cli.state_dir import server_of

    def locate() -> str:
        return server if state_dir is None else server_of(state_dir)

    if watch:
        from slipstream.cli.status_watch import run_watch

        _exit_with(run_watch(locate, interval_s=interval, as_json=as_json))
    if interval is not None:
        raise ConfigError("interval", interval, "a number with --watch")
    found = asyncio.run(fetch_status(locate()))
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        found.print()
    raise typer.Exit(0 if found.is_healthy else 1)


@app.command()
def trace(
    out: Annotated[str, typer.Argument(metavar="OUT", help="File to write; - is standard output.")],
    server: ServerOption = DEFAULT_SERVER,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of the `up` whose server is meant, instead of --server.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="How many steps, from the next one on.")] = 50,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give up when no further step was complete for so long.")
    ] = 10.0,
) -> None:
    """Write what all three processes do in the next steps as a file for https://ui.perfetto.dev or chrome://tracing.

    Nothing is switched on for it: requests must run. If they end before, the steps so far are written.
    """
    from slipstream.cli.state_dir import server_of
    from slipstream.cli.trace import run_trace

    _exit_with(run_trace(server if state_dir is None else server_of(state_dir), steps, wait, out))


@app.command()
def health(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT, or unix:PATH, of any one service.")],
) -> None:
    """Ask a service whether it serves: ends with 0 if it says SERVING, else with 1."""
    from slipstream.cli.health import check
    from slipstream.common.rpc.address import parse_address

    found = asyncio.run(check(str(parse_address(address, field="ADDRESS"))))
    if found != "SERVING":
        raise FailedPreconditionError(f"{address} says {found}")
    print(found)


@app.command()
def doctor(
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the target model.  [default: the bundled one]")
    ] = None,
    draft: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the draft model.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(metavar="|".join(ALGORITHMS), help="How drafts are made, as for `up`.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="|".join(DEVICES), help="What shall compute.")] = UpConfig.device,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address for clients.")] = UpConfig.listen,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Directory for sockets and logs.  [default: {default_state_dir()}]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this host can serve, and how fast two processes hand over here. Fails when something is missing."""
    from slipstream.cli.doctor.examination import run_doctor
    from slipstream.common.rpc.address import parse_address

    if device not in DEVICES:
        raise ConfigError("device", device, ", ".join(DEVICES))
    parse_address(listen, field="listen")
    models = ModelChoice.choose(target=target, draft=draft, algorithm=algorithm, num_draft_tokens=None)
    _exit_with(run_doctor(models, device, listen, state_dir or default_state_dir(), as_json=as_json))


@app.command()
def demo(
    algorithm: Annotated[
        str, typer.Option(metavar="|".join(WORKER_ALGORITHMS), help="How drafts are made.")
    ] = WorkerConfig.algorithm,
    device: Annotated[str, typer.Option(metavar="|".join(DEVICES), help="What computes.")] = UpConfig.device,
) -> None:
    """Watch the bundled models serve several prompts at once, with drafting and without."""
    from slipstream.cli.demo import run_demo

    _exit_with(run_demo(algorithm, device))


def _exit_with(work: Coroutine[object, object, int]) -> None:
    raise typer.Exit(asyncio.run(work))


def _fail(error: SlipstreamError, status: int) -> None:
    message = str(error)
    if isinstance(error, ConfigError):
        is_argument = error.field.isupper()
        option = error.field if is_argument else "--" + error.field.replace("_", "-")
        message = option + message.removeprefix(error.field)
    print(f"slipstream: error: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
