"""Logits into an .npz file as they come: no more than one piece of them is ever in memory.

Knows NumPy's file format; NumPy only writes the headers.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from jitllm.errors import DiskFull, JitllmError, UsageError

_SLACK_BYTES = 1 << 20


class LogitsFile:
    """`tokens` i32 [n] and `logits` f32 [n, vocab], not compressed.

    Written beside its destination and renamed by `finish`; without that it is removed at the end
    of the `with` block. Raises `UsageError` for a folder, and `DiskFull` at once if the whole file
    will not fit.
    """

    def __init__(self, path: Path, ids: Sequence[int], vocab: int) -> None:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", "name a file in it")
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._shape = (len(ids), vocab)
        self._missing_bytes = len(ids) * vocab * 4
        needed = self._missing_bytes + len(ids) * 4 + _SLACK_BYTES
        if needed > (free := shutil.disk_usage(path.absolute().parent).free):
            raise DiskFull(path, needed, free)
        self._zip = zipfile.ZipFile(self._part, "w", zipfile.ZIP_STORED)
        with self._open("tokens", "<i4", (len(ids),)) as file:
            file.write(array("i", ids).tobytes())
        self._logits = self._open("logits", "<f4", self._shape)

    def append(self, rows: memoryview[float]) -> None:
        """The logits [rows, vocab] of the next positions."""
        data = rows.cast("B")
        self._missing_bytes -= data.nbytes
        self._logits.write(data)

    def finish(self) -> None:
        """All rows are there: the file gets its name."""
        if self._missing_bytes:
            missing = self._missing_bytes // (4 * self._shape[1])
            raise JitllmError(f"the engine left out the logits of {missing} positions")
        self._logits.close()
        self._zip.close()
        os.replace(self._part, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._logits.close()
        self._zip.close()
        self._part.unlink(missing_ok=True)

    def _open(self, name: str, kind: str, shape: tuple[int, ...]) -> IO[bytes]:
        from numpy.lib.format import write_array_header_1_0

        file = self._zip.open(f"{name}.npy", "w", force_zip64=True)
        write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
        return file
