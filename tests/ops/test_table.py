"""docs/kernels.md: what it says is so, and what it names is tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitllm.kernels.layout import FORMATS, Format, FormatCode
from jitllm.kernels.table import WITH_WEIGHTS, describe, num_kernels
from tests.ops import test_embed, test_expert_matmul, test_matmul

ROOT = Path(__file__).parents[2]
TESTED = {
    "embed": {code for code, _ in test_embed.CASES},
    "matmul": {case.format for case in test_matmul.CASES},
    "expert_matmul": {case.format for case in test_expert_matmul.CASES},
}
"""By the lists of cases that tiers of a CPU and GPUs are tested with."""


def test_the_page_of_kernels_is_current() -> None:
    assert (ROOT / "docs" / "kernels.md").read_text() == describe()


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("op", WITH_WEIGHTS)
def test_every_format_has_a_kernel_everywhere(op: str, format: Format) -> None:
    on_cpu, on_gpu = num_kernels(op, format)
    assert on_cpu == 1
    assert 1 <= on_gpu <= 4


def test_every_op_is_tested_in_every_format() -> None:
    assert TESTED.keys() == WITH_WEIGHTS.keys()
    for codes in TESTED.values():
        assert codes == set(FormatCode)


def test_ops_with_weights_are_those_whose_kernels_read_them() -> None:
    folders = (ROOT / "jitllm" / "kernels").glob("*/gpu.slang")
    names = ("weights.slang", "products.slang")
    reading = {f.parent.name for f in folders if any(name in f.read_text() for name in names)}
    assert reading == WITH_WEIGHTS.keys()
