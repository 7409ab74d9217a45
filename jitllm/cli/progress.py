"""How far something is, on stderr: a bar on a terminal, a line now and then in a log.

Knows labels and counts. What is over in a moment is not shown at all, and costs no import.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from jitllm.cli.screen import note
from jitllm.units import format_rate, format_size

BAR_AFTER_S = 0.3
BAR_EVERY_S = 0.1
LINE_EVERY_S = 5.0

COUNTED = frozenset({"compiling kernels"})
"""Labels that count things; all others count bytes."""


class Progress:
    """Call it with (label, done, total); leave its `with` block to wipe the bar away.

    It may be called from any thread, from one at a time.
    """

    def __init__(self, *, show: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._is_terminal = show and sys.stderr.isatty()
        self._clock = clock
        self._label = ""
        self._started = self._shown = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_bar()

    def __call__(self, label: str, done: int, total: int) -> None:
        if not self._show:
            return
        now = self._clock()
        if label != self._label:
            self._close_bar()
            self._label, self._started, self._shown = label, now, now
        if not self._is_terminal:
            self._log(now, done, total)
        elif now - self._started >= BAR_AFTER_S and now - self._shown >= BAR_EVERY_S:
            self._shown = now
            self._draw(done, total)

    def _log(self, now: float, done: int, total: int) -> None:
        if now - self._shown >= LINE_EVERY_S:
            self._shown = now
            note(self._line(now, done, total))

    def _line(self, now: float, done: int, total: int) -> str:
        if self._label in COUNTED:
            return f"{self._label} {done}/{total}"
        rate = format_rate(done / max(now - self._started, 1e-9))
        return f"{self._label} {format_size(done)} of {format_size(total)}, {rate}"

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _bar(self._label in COUNTED)
            self._task = self._bar.add_task(self._label, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total, refresh=True)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(is_counted: bool) -> Any:
    """A bar that disappears when it is done; drawn when told to, so that it needs no thread."""
    from rich import progress
    from rich.console import Console

    columns: list[progress.ProgressColumn | str] = [
        "{task.description}",
        progress.BarColumn(),
    ]
    if is_counted:
        columns.append(progress.MofNCompleteColumn())
    else:
        columns += [
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        ]
    return progress.Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False
    )
