"""Files without a name: they end with their process, however that ends, and only it reads them."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from jitllm.errors import DiskFull, JitllmError

REMEDY = "name another folder with -kv-cache"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_nameless(folder: Path, what: str) -> int:
    """A file descriptor of a file in `folder`, which is made if there is none.

    what: is to go there, for the `JitllmError` where that cannot be.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, path = tempfile.mkstemp(dir=folder)
    except OSError as error:
        raise JitllmError(f"{what} cannot go to {folder}: {error.strerror}", REMEDY) from error
    try:
        os.unlink(path)
    except OSError as error:
        os.close(fd)
        raise JitllmError(f"{what} cannot go to {folder}: {error.strerror}", REMEDY) from error
    return fd


def refusal(error: OSError, folder: Path, fd: int, what: str, num_bytes: int) -> JitllmError:
    """What to say of an error of such a file; num_bytes: that it would take."""
    if error.errno not in _FULL:
        return JitllmError(f"{what} in {folder}: {error.strerror}", REMEDY)
    free_bytes = 0
    with suppress(OSError):
        found = os.fstatvfs(fd)
        free_bytes = found.f_bavail * found.f_frsize
    return DiskFull(folder, num_bytes, free_bytes)
