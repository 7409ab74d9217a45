"""Root-mean-square norms in NumPy, for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def norm(x: Floats, weight: Floats, eps: float, add: Floats | None = None) -> Floats:
    """f32 [rows, width], normalised per segment of len(weight), from f64 arithmetic."""
    rows, width = x.shape
    parts = x.astype(np.float64).reshape(rows, -1, len(weight))
    mean = (parts**2).mean(axis=-1, keepdims=True)
    y = (parts / np.sqrt(mean + eps) * weight).reshape(rows, width)
    total: NDArray[np.float64] = y if add is None else y + add
    return total.astype(np.float32)
