"""Every op on a Vulkan device, from the lists of cases that the CPU's tiers are tested with."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from jitllm.kernels.attention import gpu as attention_gpu
from jitllm.kernels.attention.gpu import part_keys
from jitllm.kernels.combine.reference import combine
from jitllm.kernels.embed.reference import embed
from jitllm.kernels.expert_matmul.reference import expert_matmul
from jitllm.kernels.glu.reference import glu
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul.reference import matmul
from jitllm.kernels.op import ALL_KEYS, Rows
from jitllm.kernels.quantize.reference import RECORD, quantize
from jitllm.kernels.rope_table.reference import rope_table
from tests.ops import (
    test_attention,
    test_combine,
    test_dispatch,
    test_embed,
    test_expert_matmul,
    test_gather,
    test_glu,
    test_kv_write,
    test_matmul,
    test_norm,
    test_quantize,
    test_rope,
    test_route,
    test_sample,
)
from tests.ops.histories import Case as Attended
from tests.ops.histories import Histories, computed
from tests.ops.vulkan import gpu, needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]


@pytest.mark.parametrize(
    ("code", "cols"), test_embed.CASES, ids=lambda v: getattr(v, "name", str(v))
)
def test_embed_rows(code: FormatCode, cols: int) -> None:
    table = test_embed.table_of(code, cols)
    got = test_embed.run(code, table, cols, gpu(), scale=25.298221281347036)
    expected = embed(code, table, test_embed.ROWS, cols, test_embed.TOKENS, 25.298221281347036)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("width", range(1, 71))
def test_norms_of_ragged_widths(width: int) -> None:
    x, weight, add = test_norm.data(3, width, width)
    test_norm.check(test_norm.run(x, weight, add, gpu()), x, weight, add)


@pytest.mark.parametrize(
    ("rows", "width", "segment"),
    [(1, 640, 640), (1, 1024, 256), (5, 96, 3), (3, 66, 22), (2, 70, 35), (1, 5376, 5376)],
)
@pytest.mark.parametrize("of", list(Rows))
@pytest.mark.parametrize("with_add", [False, True])
def test_norms_of_segments(rows: int, width: int, segment: int, of: Rows, with_add: bool) -> None:
    x, weight, residual = test_norm.data(rows, width, segment)
    add = residual if with_add else None
    test_norm.check(test_norm.run(x, weight, add, gpu(), of=of), x, weight, add)


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (3, 640), (70, 256), (2, 45), (4, 7)])
@pytest.mark.parametrize("of", list(Rows))
def test_quantised_records(rows: int, width: int, of: Rows) -> None:
    """A quotient that a device rounds otherwise may move a tie; everything else is exact."""
    x = test_quantize.normal(rows, width)
    got = test_quantize.run(x, gpu(), of=of).view(RECORD)
    expected = quantize(x).view(RECORD)
    np.testing.assert_allclose(got["scale"], expected["scale"], rtol=1.2e-7)
    moved = np.abs(got["q"].astype(int) - expected["q"])
    assert moved.max() <= 1
    assert (moved != 0).mean() < 1e-3
    low, high = (
        got["q"][..., :16].sum(axis=-1, dtype=int),
        got["q"][..., 16:].sum(axis=-1, dtype=int),
    )
    sums = {"": low + high, "_lo": low, "_hi": high}
    for suffix, total in sums.items():
        assert (got[f"neg{suffix}"] == -total).all()
        assert (got[f"sum{suffix}"] == total.astype(np.float32) * got["scale"]).all()


@pytest.mark.parametrize("width", [*range(1, 71), 640])
def test_gathered_rows(width: int) -> None:
    test_gather.test_rows_are_copied(gpu(), width, 1)


@pytest.mark.parametrize("kind", test_glu.KINDS)
@pytest.mark.parametrize("width", [*range(1, 71), 511, 512, 513, 2048, 6912])
def test_gated_activations(kind: str, width: int) -> None:
    gate, up = test_glu.data(2, width)
    got = test_glu.run(gate, up, kind, gpu())
    np.testing.assert_allclose(got, glu(gate, up, kind), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", test_glu.KINDS)
def test_gated_activations_in_place_and_far_out(kind: str) -> None:
    test_glu.test_output_rows_and_in_place(gpu(), kind)
    test_glu.test_far_values(gpu(), kind)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 12, 40, 64, 128])
@pytest.mark.parametrize("scale", [1.0, 1.2772588])
def test_rotary_tables(count: int, scale: float) -> None:
    """Near an ulp of 1, at every position: angles are exact, only the polynomials round."""
    freqs = test_rope.frequencies(count)
    table = test_rope.table_of(test_rope.POSITIONS, freqs, gpu(), scale)
    expected = rope_table(test_rope.POSITIONS, freqs, scale)
    assert np.abs(table - expected).max() <= 1.2e-7 * scale


def test_rotary_tables_over_many_angles() -> None:
    positions = np.arange(0, 1_000_000, 331, dtype=np.int32)
    freqs = test_rope.frequencies(24, 1e6)
    table = test_rope.table_of(positions, freqs, gpu())
    assert np.abs(table - rope_table(positions, freqs)).max() <= 1.2e-7


@pytest.mark.parametrize("is_scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("heads", "head_dim", "num_rotated"), test_rope.SHAPES)
def test_rotations(
    heads: int, head_dim: int, num_rotated: int, interleaved: bool, is_scaled: bool
) -> None:
    shape = (heads, head_dim, num_rotated, interleaved, is_scaled)
    (x, table, *args), expected = test_rope.rotation(*shape)
    assert np.abs(test_rope.rotated(x, table, gpu(), *args) - expected).max() < 2e-6


def test_what_is_not_rotated_stays() -> None:
    test_rope.test_what_is_not_rotated_stays(gpu())


@pytest.mark.parametrize("case", test_kv_write.CASES, ids=str)
def test_pages(case: Attended) -> None:
    test_kv_write.test_pages_equal_the_reference(case, gpu())


@pytest.mark.parametrize("case", test_matmul.CASES, ids=str)
def test_products(case: test_matmul.Case) -> None:
    data = test_matmul.data_of(case)
    matrix = (case.format, data.weight, case.rows, case.cols)
    expected = matmul(*matrix, data.src, data.bias, data.add, case.scale)
    got = test_matmul.run(case, gpu(), data=data)
    assert np.abs(got - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    "format", [f for f in FormatCode if FORMATS[f].is_quantized], ids=lambda f: f.name
)
def test_both_ways_to_multiply_bytes_give_the_same_bits(
    format: FormatCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without the instruction, whichever of them this device would take."""
    case = test_matmul.Case(format, 21, 512, 3, bias=True)
    found = []
    for has_fast_dot in (False, True):
        monkeypatch.setattr(gpu(), "traits", replace(gpu().traits, has_fast_dot=has_fast_dot))
        found.append(test_matmul.run(case, gpu()))
    assert np.array_equal(*found)


@pytest.mark.parametrize("format", FormatCode, ids=lambda f: f.name)
def test_a_row_does_not_depend_on_its_company(format: FormatCode) -> None:
    test_matmul.test_a_row_does_not_depend_on_its_company(format, gpu())


@pytest.mark.parametrize("format", [f for f in FormatCode if FORMATS[f].is_quantized], ids=str)
def test_extreme_integers_do_not_saturate(format: FormatCode) -> None:
    test_matmul.test_extreme_integers_do_not_saturate(format, gpu())


@pytest.mark.parametrize("case", test_attention.CASES, ids=str)
def test_attention_is_close_to_the_reference(case: Attended) -> None:
    histories = computed(case, gpu())
    assert np.abs(histories.all_out() - histories.expected()).max() < 1.5e-5


@pytest.mark.parametrize(
    "schedule", [test_attention.in_sevens, test_attention.interleaved], ids=lambda s: s.__name__
)
@pytest.mark.parametrize("case", test_attention.SPLIT, ids=str)
def test_company_changes_nothing(
    case: Attended, schedule: test_attention.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side in parts, or one thread group for all parts of a token: the same bits."""
    monkeypatch.setattr(attention_gpu, "ENOUGH_GROUPS", 1)
    whole = computed(case, gpu())
    monkeypatch.undo()
    histories = Histories(case)
    for tokens in schedule(case):
        histories.step(tokens, gpu())
    assert np.array_equal(histories.all_out(), whole.all_out())


@pytest.mark.parametrize("case", [*test_attention.CASES, *test_attention.SPLIT], ids=str)
def test_launches_over_parts_of_the_keys_change_nothing(
    case: Attended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as with all keys in one launch, whichever way that goes."""
    whole = computed(case, gpu()).all_out()
    monkeypatch.setattr(attention_gpu, "ENOUGH_GROUPS", 1)
    rng = np.random.default_rng(len(str(case)))
    histories = Histories(case)
    for tokens in test_attention.in_sevens(case):
        histories.step(tokens, gpu(), launches=test_attention.in_ranges(case, rng))
    assert np.array_equal(histories.all_out(), whole)


@pytest.mark.parametrize("window", [0, 50, 1500])
def test_far_launches_change_nothing(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no part is divided; and where some are, nearly nothing."""
    case = Attended(heads=2, k_dim=16, v_dim=16, window=window, lengths=(3000,))
    tokens, found = case.tokens(), []
    part = part_keys(3000)
    assert part == 256
    monkeypatch.setattr(attention_gpu, "ENOUGH_GROUPS", 1)
    for step in (3072, part, 3 * part, 64):
        ends = [*range(step, 3000, step), ALL_KEYS[1]]
        launches = [[(start, end)] for start, end in pairwise([0, *ends])]
        histories = Histories(case)
        histories.step(tokens[:2990], test_attention.FASTEST)
        histories.step(tokens[2990:], gpu(), launches=launches)
        found.append(histories.all_out())
    assert np.array_equal(found[1], found[0])
    assert np.array_equal(found[2], found[0])
    assert np.abs(found[3] - found[0]).max() < 1e-6


@pytest.mark.parametrize("case", test_attention.SPLIT, ids=str)
def test_page_size_changes_nothing(case: Attended) -> None:
    whole = computed(case, gpu()).all_out()
    for page_tokens in (1, 4, 16, 256):
        assert np.array_equal(computed(case.with_pages(page_tokens), gpu()).all_out(), whole)


def test_extreme_attention() -> None:
    for element, too_large in (("f16", 1e6), ("q8_0", 1e8)):
        test_attention.test_a_later_infinity_does_not_reach_earlier_tokens(
            gpu(), element, too_large
        )
    test_attention.test_large_scores_neither_overflow_nor_vanish(gpu())


def test_far_positions() -> None:
    """More chunks than parts, most of them out of sight or long past."""
    for window in (0, 50):
        case = Attended(heads=2, k_dim=16, v_dim=16, window=window, lengths=(3000,))
        histories = Histories(case)
        tokens = case.tokens()
        histories.step(tokens[:2990], test_attention.FASTEST)
        histories.step(tokens[2990:], gpu())
        assert np.abs(histories.all_out() - histories.expected()).max() < 1.5e-5


@pytest.mark.parametrize("vocab", [*range(1, 71), 1000])
def test_greedy_tokens(vocab: int) -> None:
    test_sample.test_greedy(gpu(), vocab, 1)


def test_greedy_edges() -> None:
    test_sample.test_greedy_edges(gpu())


@pytest.mark.parametrize("vocab", [1, 5, 16, 37, 300])
def test_biases_and_penalties(vocab: int) -> None:
    test_sample.test_biases(gpu(), vocab)
    if vocab > 1:
        test_sample.test_penalties(gpu(), vocab)


def test_biases_ban_and_force() -> None:
    test_sample.test_biases_ban_and_force(gpu())


@pytest.mark.parametrize("chain", test_sample.CHAINS, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 33, 70, 1000])
def test_draws(chain: dict[str, Any], vocab: int) -> None:
    test_sample.test_draws(gpu(), chain, vocab)


@pytest.mark.parametrize("chain", test_sample.CHAINS, ids=str)
@pytest.mark.parametrize("spread", [0.01, 1, 3])
def test_draws_from_a_large_vocabulary(chain: dict[str, Any], spread: float) -> None:
    test_sample.test_a_large_vocabulary(gpu(), chain, spread)


def test_log_probabilities() -> None:
    test_sample.test_log_probabilities(gpu())


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 33, 70, 1000, 5003])
@pytest.mark.parametrize("num_top", [1, 2, 5, 20])
def test_top_lists(vocab: int, num_top: int) -> None:
    test_sample.test_top_lists(gpu(), vocab, num_top)


def test_top_lists_hold_what_has_a_probability() -> None:
    test_sample.test_top_lists_hold_what_has_a_probability(gpu())


@pytest.mark.parametrize("case", test_route.CASES, ids=str)
def test_routes(case: test_route.Case) -> None:
    logits, bias = test_route.data_of(case)
    ids, weights = test_route.run(case, logits, bias, gpu())
    wanted_ids, wanted_weights = test_route.expected(case, logits, bias)
    assert (ids == wanted_ids).all()
    np.testing.assert_allclose(weights, wanted_weights, rtol=4e-6)


def test_routes_of_odd_scores() -> None:
    test_route.test_of_equal_scores_the_lower_id_comes_first(gpu())
    test_route.test_weights_that_vanish_are_not_divided_by_nothing(gpu())
    for score in ("softmax", "sigmoid"):
        for groups in (1, 4):
            test_route.test_whatever_the_logits_are_experts_exist_and_differ(gpu(), score, groups)


@pytest.mark.parametrize(
    ("tokens", "used", "experts"),
    [(1, 1, 1), (1, 8, 64), (2, 1, 8), (5, 2, 8), (63, 3, 17), (200, 6, 8), (150, 1, 2)],
)
def test_sorted_pairs(tokens: int, used: int, experts: int) -> None:
    test_dispatch.test_pairs_are_sorted_and_cut_into_panels(tokens, used, experts, gpu())


def test_all_tokens_may_go_to_one_expert() -> None:
    test_dispatch.test_all_tokens_may_go_to_one_expert(gpu())


@pytest.mark.parametrize("into", ["dst", "dst+add", "add"])
@pytest.mark.parametrize(("used", "width"), [(1, 32), (2, 512), (3, 544), (8, 2048)])
def test_combined_experts(used: int, width: int, into: str) -> None:
    src, routed, add = test_combine.data(3, used, width)
    got = test_combine.run(src, routed, add, into, gpu(), scale=0.22)
    wanted = combine(src, routed, add if "add" in into else None, 0.22)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("case", test_expert_matmul.CASES, ids=str)
def test_products_with_experts(case: test_expert_matmul.Case) -> None:
    data = test_expert_matmul.data_of(case)
    rows = np.broadcast_to(data.src, (case.tokens, case.used, data.src.shape[2]))
    wanted = expert_matmul(case.format, data.matrices, case.rows, case.cols, rows, data.ids)
    got = test_expert_matmul.run(case, data, gpu())
    assert np.abs(got - wanted).max() <= 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("format", [FormatCode.F16, FormatCode.Q4_K], ids=lambda f: f.name)
def test_a_row_with_experts_is_what_a_plain_product_gives(format: FormatCode) -> None:
    test_expert_matmul.test_a_row_is_what_a_plain_product_gives(format, gpu())
