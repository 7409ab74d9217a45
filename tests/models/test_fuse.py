"""What is quantised in the op that gives it, and what is still written beside that."""

from __future__ import annotations

import pytest

from jitllm.devices.fuse import fused
from jitllm.kernels.glu import Glu
from jitllm.kernels.layout import FormatCode
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Buffer, Element, Op, Weight
from jitllm.kernels.quantize import Quantize
from tests.models import oracle
from tests.models.test_build import with_formats

GAIN = Weight("gain", 0, FormatCode.F32, 0, 32)
ROW, WIDE, DST = Buffer("row", 32), Buffer("row", 64), Buffer("dst", 64)
RECORDS = Buffer("records", 64, element=Element.Q8)


def giving(ops: list[Op]) -> list[tuple[str, bool]]:
    """Ops that quantise what they give: what that is, and whether it is dropped."""
    found = [op for op in ops if isinstance(op, Norm | Glu) and op.quantized is not None]
    return [(op.dst.name, op.drops) for op in found]


def test_norms_and_activations_quantise_what_only_products_of_records_read() -> None:
    graph = oracle.quantized("q4_0").graph()
    for block in graph.blocks:
        ops = fused(block)
        assert [op.src.name for op in ops if isinstance(op, Quantize)] == ["attn"]
        assert giving(ops) == [("h", True), ("h", True), ("gate", True)]
    assert giving(fused(graph.head)) == [("out", True)]


def test_what_a_product_of_floats_reads_is_written_too() -> None:
    mixed = with_formats(oracle.quantized("q4_0"), attn_v=FormatCode.F16, ffn_down=FormatCode.F16)
    for block in mixed.graph().blocks:
        assert giving(fused(block)) == [("h", False), ("h", True)]


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_all_else_stays_as_it_was(name: str) -> None:
    for block in oracle.quantized(name).graph().blocks:
        kept = [
            [op for op in ops if not isinstance(op, Norm | Glu | Quantize)]
            for ops in (block, fused(block))
        ]
        assert kept[0] == kept[1]
        written = [
            {b for op in ops for b in op.writes if b.element is Element.Q8}
            for ops in (block, fused(block))
        ]
        assert written[0] == written[1]


@pytest.mark.parametrize(
    "ops",
    [
        [Norm(WIDE, DST, GAIN, 1e-6, 32), Quantize(DST, RECORDS)],  # head by head
        [Norm(ROW, ROW, GAIN, 1e-6, 32), Quantize(DST, RECORDS)],  # of something else
        [Quantize(DST, RECORDS), Norm(ROW, ROW, GAIN, 1e-6, 32)],  # before it
    ],
    ids=["heads", "other", "first"],
)
def test_what_is_no_row_of_the_op_before_is_quantised_by_itself(ops: list[Op]) -> None:
    assert fused(ops) == ops
