"""Copying the output rows in NumPy, for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def gather(src: NDArray[np.float32], outputs: NDArray[np.int32]) -> NDArray[np.float32]:
    """Rows `outputs` of f32 [tokens, width]."""
    return src[outputs]
