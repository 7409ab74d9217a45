"""Embedding rows in NumPy, for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jitllm.kernels.layout import FormatCode
from jitllm.kernels.matmul.reference import dequantise


def embed(
    format: FormatCode,
    table: bytes,
    rows: int,
    cols: int,
    tokens: NDArray[np.int32],
    scale: float = 1.0,
) -> NDArray[np.float32]:
    """Hidden states f32 [tokens, cols] from the tiles of a matrix [rows, cols]."""
    return dequantise(format, table, rows, cols)[tokens] * np.float32(scale)
