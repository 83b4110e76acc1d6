"""A console for a command that goes on, and ends in order, when nobody reads it any more."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOBODY_READS = (errno.EIO, errno.EPIPE)
"""Of a terminal that is gone, and of a pipe whose reader is."""


def nonfailing_console() -> Console:
    """Writes to standard error, and raises nothing when that fails."""
    return Console(file=cast("TextIO", NonfailingOutput(sys.stderr)))


class NonfailingOutput:
    """A text file that loses what it cannot write, and becomes /dev/null once nobody reads it."""

    def __init__(self, file: TextIO) -> None:
        """Writes to `file`; all else that is asked of this one, `file` answers."""
        self._file = file

    def __getattr__(self, name: str) -> Any:
        """What `file` has under this name."""
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Says that all was written, whether it was or not."""
        with self._losing():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, or loses it."""
        with self._losing():
            self._file.flush()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _NOBODY_READS:
                self._redirect()

    def _redirect(self) -> None:
        # The descriptor, not this object: buffers below still hold the text, and whoever flushes them would fail again,
        # the interpreter at its end too, which then changes the exit status.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._file.fileno())
        os.close(null)
