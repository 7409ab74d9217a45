"""Causal grouped-query attention over KV pages."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import PAGES, Buffer, Weight

CHUNK_KEYS = 64
"""Keys that the softmax takes at once; a chunk starts at a multiple of it."""


@dataclass(frozen=True, slots=True)
class Attention:
    """dst[t, h] = softmax over keys j of (scale * q[t, h] . k[j]) @ v[j], j in (p - window, p].

    p = positions[t]; window 0: all keys from 0. q: f32 [tokens, heads * k_dim]; dst: f32
    [tokens, heads * v_dim]. Query head h reads KV head h // (heads // kv_heads). Pages as
    `kv_write` leaves them; page_tokens any power of two (a chunk may span pages).
    softcap > 0: a score becomes softcap * tanh(score / softcap), where tanh |x| = (1 - t) / (1 + t)
    with t = exp(-2 |x|).

    The one arithmetic: chunks of CHUNK_KEYS keys at absolute multiples of CHUNK_KEYS, in order,
    from the first that holds a visible key. Score of a key: acc = fma(q[d], k[d, key], acc) over d
    in order from 0, times `scale`; keys out of sight are -inf. m' = max(m, max of the chunk),
    c = exp(m - m'), w = exp(s - m') (0 for keys out of sight); l = fma(l, c, sum of the chunk's w:
    four 16-lane vectors added in order, then `hsum`); o = o * c, then o = fma(w[key], v[key], o)
    key by key. At the end o / l. A chunk out of sight changes nothing, so it may be skipped.
    Of q8_0, k[d, key] and v[key] are signed bytes. A group of a key comes to part = fma(q[d],
    k[d, key], part) over its 32 d in order from 0, and acc = fma(scale of the group, part, acc);
    w[key] is multiplied by the scale of the group before it meets values, not where l adds it up.

    A launch takes the keys of each row's range [from, to) (`Ctx.RANGES`): from a multiple of
    CHUNK_KEYS, to another one, or beyond the last key. A token whose first visible key is not
    before the range begins with nothing; one whose last key is in it ends. Between two launches
    `dst` has o, and `carry` m and l. So launches whose ranges follow each other give the bits of a
    single one, and each touches no page outside of its range. An empty range leaves the tokens of
    its row as they are.
    """

    q: Buffer
    dst: Buffer
    block: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def carry(self) -> Buffer:
        """f32 [tokens, heads, 2]: m and l of each head, between launches."""
        return Buffer(f"{self.dst.name}.carry", 2 * self.heads)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Queries and KV pages."""
        return (self.q, PAGES)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Attended values, and what is carried from launch to launch."""
        return (self.dst, self.carry)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
