"""The rows whose logits are wanted."""

from __future__ import annotations

import numpy as np
import pytest

from jitllm.jit.tiers import Tier
from jitllm.kernels.gather import Gather
from jitllm.kernels.gather.reference import gather
from jitllm.kernels.op import Buffer, Rows
from tests.ops.harness import HERE, Rig


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("width", [*range(1, 71), 640])
@pytest.mark.parametrize("pieces", [1, 3])
def test_rows_are_copied(tier: Tier, width: int, pieces: int) -> None:
    """In any order, repeated, or none."""
    src = np.random.default_rng(width).standard_normal((5, width)).astype(np.float32)
    for rows in ([4], [0, 1, 2, 3, 4], [3, 3, 0], []):
        outputs = np.array(rows, np.int32)
        rig = Rig(5, len(rows), arrays={"src": src}, outputs=outputs)
        op = Gather(Buffer("src", width), Buffer("dst", width, Rows.OUTPUTS))
        rig.run(op, tier, pieces)
        assert rig.value("dst").tobytes() == gather(src, outputs).tobytes()
