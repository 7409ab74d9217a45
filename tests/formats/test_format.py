"""docs/format.md says what the code does: its tables, and the reader that stands in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jitllm.formats import jlm_head, layout
from jitllm.formats.jlm import Container
from jitllm.kernels.layout import FORMATS, GROUP, Format, FormatCode
from tests.conftest import TinyModel
from tests.formats.test_layout import ROWS, cols_of, raw_of

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Cells of the first table behind a heading, without its own headings."""
    rows = re.findall(r"^\|(.*)\|$", PAGE.partition(heading)[2].split("\n\n|", 1)[1], re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    end = next((n for n, row in enumerate(cells[2:], 2) if len(row) != len(cells[0])), len(cells))
    return cells[1:end]


def row_of(form: Format) -> list[str]:
    """A format's row, from the code."""
    quantized, span = form.is_quantized, form.super_cols or GROUP
    scale = {1: "i8" if form.scale_signed else "u8", 2: "f16", 0: ""}[form.scale_bytes]
    mins = "added" if form.min_is_added else "subtracted"
    return [
        form.name,
        str(form.code.value),
        "+".join(map(str, form.planes)) or "-",
        str(form.bias) if quantized else "-",
        f"{form.scales_per_group} {scale}" if quantized else "-",
        mins if form.has_min else "-",
        ("d, dmin" if form.has_min else "d") if form.super_cols else "-",
        str(form.group_bytes),
        str(span),
        str(form.tile_bytes(span)),
        f"{form.tile_bytes(span) / span / 2:g}",
    ]


def test_the_table_of_formats_is_the_codes() -> None:
    assert table("### Formats") == [row_of(form) for form in FORMATS.values()]


def test_the_prologue_is_the_codes() -> None:
    rows = [row[:2] for row in table("### Prologue")]
    sizes = {"8 bytes": 8, "u32": 4, "u64": 8}
    assert sum(sizes[kind] for _, kind in rows) == jlm_head.PROLOGUE.size
    offsets = [int(offset) for offset, _ in rows]
    assert offsets == [sum(sizes[kind] for _, kind in rows[:n]) for n in range(len(rows))]
    assert f"version of the format: {jlm_head.VERSION}" in PAGE
    assert f"at most {jlm_head.MAX_HEADER_BYTES >> 20} MiB" in PAGE


def test_the_keys_of_the_header_are_the_codes() -> None:
    keys = [row[0].strip("`") for row in table("### The header")]
    assert keys == [f.name for f in fields(jlm_head.Header)][1:]
    assert len(table("A **tensor**")) == len(fields(jlm_head.TensorEntry))


@pytest.fixture(scope="module")
def weight() -> Callable[..., float]:
    """The reader of the page."""
    namespace: dict[str, Any] = {}
    exec(PAGE.partition("```python\n")[2].partition("```")[0], namespace)
    assert list(namespace["FORMATS"]) == [f.name for f in FORMATS.values() if f.is_quantized]
    return namespace["weight"]


@pytest.mark.parametrize("code", [c for c in FormatCode if FORMATS[c].is_quantized], ids=str)
def test_the_reader_of_the_page_reads(weight: Callable[..., float], code: FormatCode) -> None:
    cols = cols_of(code)
    packed = layout.pack(code, raw_of(code), ROWS, cols)
    expected = layout.unpack(code, packed, ROWS, cols)
    got = np.array(
        [
            [weight(packed.tobytes(), cols, code.name, r, c) for c in range(cols)]
            for r in (0, 17, 36)
        ]
    )
    assert np.allclose(got, expected[[0, 17, 36]], rtol=1e-6, atol=1e-9)


def test_the_page_finds_a_tensor(tiny_model: TinyModel, weight: Callable[..., float]) -> None:
    """With nothing but what it says of prologue, header and extents."""
    import msgpack

    path = tiny_model("llama-q", "q8_0")
    data = path.read_bytes()
    size = int.from_bytes(data[16:24], "little")
    header = msgpack.unpackb(data[32 : 32 + size])
    entry = next(t for t in header["tensors"] if t[:2] == ["attn_q", 1])
    start = int.from_bytes(header["blocks"][24:32], "little")
    raw = data[start + entry[6] : start + entry[6] + entry[7]]
    with Container.open(path) as container:
        found = next(t for t in container.header.tensors if (t.role, t.block) == ("attn_q", 1))
        assert container.read(found) == raw
    expected = layout.unpack(FormatCode(entry[2]), raw, entry[3], entry[4])
    assert weight(raw, entry[4], FormatCode(entry[2]).name, 5, 70) == pytest.approx(expected[5, 70])
