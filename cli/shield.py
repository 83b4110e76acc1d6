"""Work that is done to its end, whoever is cancelled while it waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def _nothing() -> None:
    """For work that goes on as before."""


async def shielded(
    work: Coroutine[object, object, None],
    *,
    during: BaseException | None = None,
    on_cancel: Callable[[], None] = _nothing,
) -> None:
    """Does the work to its end, in a task of its own, and raises what it raises.

    A cancellation meanwhile calls `on_cancel` and is raised at the end, unless there is an error on its way already,
    `during`, which the caller lets go on.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    task.result()
    if cancelled is not None and during is None:
        raise cancelled
