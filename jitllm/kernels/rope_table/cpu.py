"""Rotary angles on the CPU: sine and cosine in f64, eight frequencies at a time."""

from __future__ import annotations

from jitllm.jit.emit import Kernel, Value, f64, i32, i64, spans, vec
from jitllm.kernels.op import Count, Ctx, Env, KernelSpec, Launch
from jitllm.kernels.rope_table import RopeTable

F64_LANES = 8

HALF_PI_HIGH = 1.5707963267948966
HALF_PI_LOW = 6.123233995736766e-17
"""pi/2 in two parts: the fma keeps n * high exact, so what is left is right to 2^-106 n."""

ROUND = 6755399441055744.0
"""1.5 * 2^52: adding it leaves the nearest integer in the mantissa's low bits."""

# Minimax polynomials in r^2 on [-pi/4, pi/4] (fdlibm's), highest power first.
SINE = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
COSINE = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)


def launches(op: RopeTable, env: Env) -> list[Launch]:
    """An item is a token."""
    spec = KernelSpec.of(
        "rope_table",
        num_frequencies=op.dst.width // 2,
        scale=op.scale,
        stride_bytes=op.dst.stride_bytes,
    )
    args = (env.buffer(op.dst), env.const(op.frequencies))
    return [Launch(spec, Count.TOKENS, 1, args)]


def emit(k: Kernel, *, num_frequencies: int, scale: float, stride_bytes: int) -> None:
    """Arguments: dst, frequencies."""
    dst, frequencies = k.arg(0), k.arg(1)
    with k.items() as token:
        position = k.load(k.ctx(Ctx.POSITIONS) + token * 4, i32).to_double()
        cosines = dst + token * stride_bytes
        sines = cosines + num_frequencies * 4

        def piece(first: Value | int, lanes: int) -> None:
            at = first * 4
            frequency = k.load(frequencies + first * 8, vec(f64, lanes))
            sine, cosine = _sincos(k, frequency * position)
            k.store(cosine.to_single() * scale, cosines + at)
            k.store(sine.to_single() * scale, sines + at)

        full = num_frequencies // F64_LANES * F64_LANES
        with k.loop(0, full, F64_LANES) as first:
            piece(first, F64_LANES)
        for offset, lanes in spans(num_frequencies - full, F64_LANES):
            piece(full + offset, lanes)


def _sincos(k: Kernel, angle: Value) -> tuple[Value, Value]:
    """Sine and cosine of f64 lanes, |angle| < 2^51."""
    kind = angle.type
    shifted = angle * (1 / HALF_PI_HIGH) + ROUND
    turns = shifted - ROUND
    r = k.fma(turns, k.const(-HALF_PI_HIGH, kind), angle)
    r = k.fma(turns, k.const(-HALF_PI_LOW, kind), r)
    z = r * r
    sine = k.fma(r * z, _polynomial(k, z, SINE), r)
    cosine = k.fma(z * z, _polynomial(k, z, COSINE), 1.0 - z * 0.5)

    # Each quarter turn swaps the two and flips one sign.
    quarter = shifted.bits(vec(i64, kind.count))
    is_odd = (quarter & 1).ne(0)
    sine, cosine = k.select(is_odd, cosine, sine), k.select(is_odd, sine, cosine)
    sine = k.select((quarter & 2).ne(0), -sine, sine)
    cosine = k.select(((quarter + 1) & 2).ne(0), -cosine, cosine)
    return sine, cosine


def _polynomial(k: Kernel, z: Value, coefficients: tuple[float, ...]) -> Value:
    p = k.const(coefficients[0], z.type)
    for c in coefficients[1:]:
        p = k.fma(p, z, k.const(c, z.type))
    return p
