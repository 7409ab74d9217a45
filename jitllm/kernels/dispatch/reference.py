"""Sorting pairs in NumPy, for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jitllm.kernels.op import PANEL_TOKENS

Ints = NDArray[np.int32]


def dispatch(ids: Ints, experts: int) -> tuple[Ints, list[tuple[int, int, int]]]:
    """The pairs of i32 [tokens, used] in order, and the panels: (expert, start, stop)."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    panels, start = [], 0
    for expert in range(experts):
        stop = start + int((flat == expert).sum())
        panels += [
            (expert, first, min(first + PANEL_TOKENS, stop))
            for first in range(start, stop, PANEL_TOKENS)
        ]
        start = stop
    return order, panels
