"""`slipstream jobs`, `watch` and `cancel`: the jobs of a server by their names."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from slipstream.cli.generate import print_output
from slipstream.client import AsyncClient
from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from typing import Unpack

    from slipstream.client.connection import AccessOptions
    from slipstream.common.api.job_info import JobInfo

MAX_JOBS = 1000
_UNFOLDED_WIDTH = 240


async def run_jobs(server: str, num_jobs: int, *, as_json: bool, **access: Unpack[AccessOptions]) -> int:
    """Prints the latest jobs as a table or as JSON lines; gives the exit status. Raises ConnectionLostError."""
    if not 1 <= num_jobs <= MAX_JOBS:
        raise ConfigError("limit", num_jobs, f"1 to {MAX_JOBS}")
    async with AsyncClient(server, **access) as client:
        page = await client.list_jobs(page_size=num_jobs)
    if as_json:
        for job in page.jobs:
            print(json.dumps({**asdict(job), "created_at": job.created_at.isoformat()}))
    else:
        _print(page.jobs)
    return 0


async def run_watch_job(
    server: str, job_id: str, from_token: int, *, as_json: bool, **access: Unpack[AccessOptions]
) -> int:
    """Prints a job's output, without the first `from_token` tokens of each sample; gives the exit status.

    A signal leaves the job as it is. Raises NotFoundError, and the error that ended the job.
    """
    async with AsyncClient(server, **access) as client:
        num_samples = len((await client.get_job(job_id)).samples)
        output = client.watch_job(job_id, [from_token] * num_samples)
        return await print_output(output, num_samples=num_samples, as_json=as_json)


async def run_cancel(server: str, job_id: str, **access: Unpack[AccessOptions]) -> int:
    """Ends a job; gives the exit status. Raises NotFoundError."""
    async with AsyncClient(server, **access) as client:
        await client.cancel_job(job_id)
    return 0


def _print(jobs: tuple[JobInfo, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("job", "state", "end", "tokens", "created (UTC)"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "tokens" else "left")
    for job in jobs:
        end = job.error or (job.finish_reason or "-")
        table.add_row(job.job_id, job.state, end, f"{job.num_tokens}", f"{job.created_at:%Y-%m-%d %H:%M:%S}")
    Console(width=None if sys.stdout.isatty() else _UNFOLDED_WIDTH, markup=False).print(table)
