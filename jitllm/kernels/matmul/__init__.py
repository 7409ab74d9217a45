"""Matrix products: every weight format against f32 or quantised activations."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight


@dataclass(frozen=True, slots=True)
class MatMul:
    """dst[r, i] = (sum over j of weight[i, j] * src[r, j] (+ bias[i])) * scale (+ add[r, i]).

    src: Q8 records for quantised formats, f32 for float formats; width = weight.cols.
    dst: f32, width = weight.rows. bias: f32 vector. add: f32 residual like dst; may be dst.
    Padding rows of the last tile are not written to dst (a row's padding stays zero).

    The one arithmetic, whatever the number of rows, the tier or the threads. A lane is a weight
    row; acc starts at 0.
    - Quantised: for every group in order and every scale of the group in order (one of 32 weights,
      or two of 16): dot = exact integer sum of (q - bias) * a over the scale's weights;
      s = w_scale * a_scale; acc = fma(float(dot), s, acc); where the format has mins, then
      acc = fma(-w_min, a_sum, acc) (+w_min where the min is added).
      w_scale = d * float(byte scale) and w_min = dmin * float(byte min) under super-scales, else
      the f16 widened. a_sum: the f32 sum in the activation's record, of the 32 or of the half that
      the min covers.
    - Float: acc = fma(float(w), x, acc) in column order.
    Then acc + bias, then acc * scale (rounded to f32), then acc + add.

    peaks: of an output head (dst then has a row for each output), where sampling begins: see
    `Sample.peaks_buffer`. For each slice of the weight rows a pair of the first that has the
    largest dst of the slice and that value; (weight.rows, -inf) where no dst of it is a number.
    Rows of dst whose sampling record has the flag PEAK_ONLY are not written then. None on a device
    that looks for peaks itself.
    """

    src: Buffer
    dst: Buffer
    weight: Weight
    bias: Weight | None = None
    add: Buffer | None = None
    scale: float = 1.0
    peaks: Buffer | None = None

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Activations and residual."""
        return (self.src,) if self.add is None else (self.src, self.add)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The product, and its peaks."""
        return (self.dst,) if self.peaks is None else (self.dst, self.peaks)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The matrix and its bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)
