"""Embedding rows on the CPU: a work item is one token.

A row is one lane of its tile: its words lie 64 bytes apart. Four words at a time become 16 weights
in a vector. Knows no model; one kernel a format serves all widths.
"""

from __future__ import annotations

import struct

from jitllm.jit.emit import LANES, Kernel, Value, i8, i16, i32, vec
from jitllm.kernels.embed import Embed
from jitllm.kernels.layout import FORMATS, GROUP, TILE_ROWS, WORD_ROW_BYTES, Format, FormatCode
from jitllm.kernels.op import Count, Ctx, Env, KernelSpec, Launch

TABLE, DST, DST_STRIDE, SUPERS, SCALE = range(5)
"""Argument words: addresses, bytes between rows, super-groups of a row, the factor's f32 bits."""


def launches(op: Embed, env: Env) -> list[Launch]:
    """One launch, an item a token."""
    form = FORMATS[op.table.format]
    args = (
        env.weight(op.table),
        env.buffer(op.dst),
        op.dst.stride_bytes,
        form.padded_cols(op.table.cols) // _super_cols(form),
        struct.unpack("<I", struct.pack("<f", op.scale))[0],
    )
    return [Launch(KernelSpec.of("embed", format=form.name), Count.TOKENS, 1, args)]


def emit(k: Kernel, *, format: str) -> None:
    """The kernel of one weight format."""
    form = FORMATS[FormatCode[format]]
    super_cols = _super_cols(form)
    super_bytes = form.tile_bytes(super_cols)
    supers, scale = k.arg(SUPERS), k.arg(SCALE).trunc(i32).as_f32()
    ids = k.ctx(Ctx.TOKENS)
    with k.items() as token:
        row = k.load(ids + token * 4, i32).sext(supers.type)
        tile = k.arg(TABLE) + row.udiv(TILE_ROWS) * (supers * super_bytes)
        lane = row.urem(TILE_ROWS)
        dst = k.arg(DST) + token * k.arg(DST_STRIDE)
        with k.loop(0, supers) as s:
            head = tile + s * super_bytes
            d = k.load_f16(head + lane * 2, 1) if form.super_cols else None
            d_min = k.load_f16(head + (2 * TILE_ROWS) + lane * 2, 1) if d and form.has_min else None
            first = head + form.super_header_bytes
            with k.loop(0, super_cols // GROUP) as g:
                group = first + g * form.group_bytes
                out = dst + (s * super_cols + g * GROUP) * 4
                for half in (0, 1):
                    values = _half(k, form, group, lane, half, d, d_min) * scale
                    k.store(values, out + half * LANES * 4)


def _super_cols(form: Format) -> int:
    """Weights after which a tile repeats itself."""
    return form.super_cols or GROUP


def _half(
    k: Kernel,
    form: Format,
    group: Value,
    lane: Value,
    half: int,
    d: Value | None,
    d_min: Value | None,
) -> Value:
    """Weights [16 half, 16 half + 16) of one row in a group, f32 [16]."""
    if not form.is_quantized:
        return _floats(k, form, group + lane * 4, half)
    which = half if form.scales_per_group == 2 else 0

    def number(at: int, super_scale: Value | None) -> Value:
        address = group + at + (lane + which * TILE_ROWS) * form.scale_bytes
        if super_scale is None:
            return k.load_f16(address, 1)
        byte = k.load(address, i8)
        return super_scale * (byte.sext(i32) if form.scale_signed else byte.zext(i32)).to_float()

    q = (_integers(k, form, group + lane * 4, half) - form.bias).to_float()
    s = number(form.scale_offset, d)
    if not form.has_min:
        return q * s
    m = number(form.min_offset, d_min)
    return k.fma(q, s, m if form.min_is_added else -m)


def _integers(k: Kernel, form: Format, words: Value, half: int) -> Value:
    """16 unsigned weights of a row, i32 [16]; `words` addresses the row's first word."""
    fours = k.const(0, vec(i32, 4))
    for i in range(4):
        fours = fours.insert(i, _four(k, form, words, 4 * half + i))
    return fours.bits(vec(i8)).zext(i32)


def _four(k: Kernel, form: Format, words: Value, index: int) -> Value:
    """Weights 4 index .. 4 index + 3 of a row's group, a byte each, i32."""
    four = k.const(0, i32)
    below = 0
    for plane, bits in enumerate(form.planes):
        word, place = divmod(index, 8 // bits)
        raw = k.load(words + (form.plane_offset(plane) + word * WORD_ROW_BYTES), i32)
        mask = ((1 << bits) - 1) * 0x01010101
        four = four | (((raw >> (place * bits)) & mask) << below)
        below += bits
    return four


def _floats(k: Kernel, form: Format, words: Value, half: int) -> Value:
    """16 weights of a row in a float format, f32 [16]."""
    count = LANES * form.float_bytes // 4
    raw = k.const(0, vec(i32, count))
    for i in range(count):
        raw = raw.insert(i, k.load(words + (half * count + i) * WORD_ROW_BYTES, i32))
    if form.float_bytes == 4:
        return raw.as_f32()
    bits = raw.bits(vec(i16)).zext(i32)
    return k.widen_f16(bits) if form.code is FormatCode.F16 else (bits << 16).as_f32()
