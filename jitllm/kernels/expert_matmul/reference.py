"""Products with experts in NumPy, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitllm.kernels.layout import FormatCode
from jitllm.kernels.matmul.reference import F32s, matmul


def expert_matmul(
    format: FormatCode,
    matrices: Sequence[bytes],
    rows: int,
    cols: int,
    src: NDArray[Any],
    ids: NDArray[np.int32],
) -> F32s:
    """The products f32 [tokens, used, rows]. matrices: of each expert. src: [tokens, used, ...],
    records or f32 as for `matmul`. ids: i32 [tokens, used]."""
    dst = np.empty((*ids.shape, rows), np.float32)
    for expert in np.unique(ids):
        chosen = ids == expert
        dst[chosen] = matmul(format, matrices[expert], rows, cols, src[chosen])
    return dst
