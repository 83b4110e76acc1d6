"""Writes a journal until it is killed: one number a step, told on standard output once it is committed."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from slipstream.gateway.journal import Journal
from slipstream.gateway.journal_file import JournalFile, JournalMode

SHORT_JOBS_EVERY = 7


async def main(path: Path, mode: JournalMode) -> None:
    """Goes on behind the last number of the file."""
    file = JournalFile.open(path, mode)
    number = max((int.from_bytes(row, "big") for _, rows in file.rows() for row in rows), default=0)
    job = max((job.number for job in file.jobs()), default=0)
    journal = Journal(file, on_failure=lambda error: os._exit(1), save=lambda jobs: None)
    if job == 0:
        journal.accepted(job := 1, b"goes on for ever")
    while True:
        number += 1
        if number % SHORT_JOBS_EVERY == 0:
            job += 1
            journal.accepted(job, b"%d" % number)
            journal.saved(job, b"its output", ended_ns=1)
        journal.outputs(number.to_bytes(8, "big"), then=lambda said=number: os.write(1, b"%d\n" % said))
        # Now and then several steps come before one commit.
        if number % 5:
            await journal.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), JournalMode(sys.argv[2])))
