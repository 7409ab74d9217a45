"""Rotary angles in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rope_table(
    positions: NDArray[np.int32], frequencies: NDArray[np.float64], scale: float = 1.0
) -> NDArray[np.float32]:
    """f32 [tokens, 2n]: cosines, then sines, of positions [tokens] times frequencies [n]."""
    angles = positions.astype(np.float64)[:, None] * frequencies
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return table.astype(np.float32) * np.float32(scale)
