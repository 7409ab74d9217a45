"""What the wiring decides, and what it refuses."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from jitllm.kernels.attention import Attention
from jitllm.kernels.combine import Combine
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.glu import Glu
from jitllm.kernels.layout import FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Element, Op, Weight
from jitllm.kernels.quantize import Quantize
from jitllm.kernels.route import Route
from jitllm.models.graph import Graph
from jitllm.models.hparams import BadModel, Hparams
from jitllm.models.registry import make_graph
from tests.models import oracle
from tests.models.reference import Source


def with_formats(source: Source, **formats: FormatCode) -> Source:
    """The same tensor table with other weight formats, by role."""
    weights = [replace(w, format=formats.get(w.role, w.format)) for w in source.weights]
    return replace(source, weights=weights)


def of_kind(ops: tuple[Op, ...], kind: type) -> list[int]:
    """Indices of a kind of op."""
    return [i for i, op in enumerate(ops) if isinstance(op, kind)]


@pytest.mark.parametrize("name", oracle.FLOAT_MODELS)
def test_blocks_share_a_dozen_buffers(name: str) -> None:
    """And those with experts, shared and gated ones too, another dozen."""
    source = oracle.model(name)
    graph = source.graph()
    assert len(graph.buffers()) <= (26 if name in oracle.MIXTURES else 14)
    assert graph.hidden.name == "x"
    assert graph.logits.name == "logits"
    assert graph.logits.width == graph.vocab == 320
    folded_in = {w for w in source.weights if w.role == "rope_freqs"}
    assert set(graph.weights()) == set(source.weights) - folded_in


def test_float_weights_need_no_quantised_rows() -> None:
    assert not any(isinstance(op, Quantize) for op in oracle.model("llama").graph().ops())


def test_a_source_is_quantised_once_for_all_its_readers() -> None:
    graph = oracle.quantized("q4_0").graph()
    for block in graph.blocks:
        sources = [op.reads[0].name for op in block if isinstance(op, Quantize)]
        assert sources == ["h", "attn", "h", "gate"]
    assert len(of_kind(graph.head, Quantize)) == 1


def test_each_product_reads_what_its_format_wants() -> None:
    mixed = with_formats(oracle.quantized("q4_0"), attn_v=FormatCode.F16, ffn_up=FormatCode.BF16)
    for block in mixed.graph().blocks:
        products = {op.weight.role: op for op in block if isinstance(op, MatMul)}
        assert products["attn_v"].src.element is Element.F32
        assert products["ffn_up"].src.element is Element.F32
        assert products["attn_q"].src is not products["attn_v"].src
        assert all(
            p.src.element is Element.Q8
            for role, p in products.items()
            if role not in ("attn_v", "ffn_up")
        )


def test_the_head_is_the_embedding_where_there_is_no_other() -> None:
    tied, own = oracle.model("llama-plain").graph(), oracle.model("llama").graph()
    assert tied.head[-1].weights == tied.embed[0].weights
    assert own.head[-1].weights[0].role == "output"


def test_windows_and_tables_follow_the_pattern() -> None:
    graph = oracle.model("gemma3").graph()
    assert [shape.window for shape in graph.kv] == [16] * 5 + [0, 16]
    assert [op.writes[0].name for op in graph.tables] == ["rope_local", "rope"]


def test_the_file_may_have_a_pattern_of_its_own() -> None:
    assert windows(pattern=2) == [16, 0, 16, 0, 16, 0, 16]
    assert windows(pattern=[False, True, True, False, False, False, True]) == [
        0,
        16,
        16,
        0,
        0,
        0,
        16,
    ]
    assert windows(pattern=0) == [16] * 7
    assert windows(pattern=1) == [0] * 7


def windows(pattern: object) -> list[int]:
    """Windows of the blocks under a pattern."""
    source = oracle.model("gemma3")
    config = {**source.config, "attention.sliding_window_pattern": pattern}
    return [s.window for s in make_graph(source.arch, config, source.weights).kv]


def test_scores_of_the_largest_released_model_are_scaled_by_width() -> None:
    source = oracle.model("gemma3")

    def scale(num_blocks: int) -> float:
        first = [w for w in source.weights if w.block == 0]
        dense = [w for w in source.weights if w.block is None]
        weights = dense + [replace(w, block=i) for i in range(num_blocks) for w in first]
        config = {**source.config, "block_count": num_blocks, "embedding_length": 256}
        graph = make_graph(source.arch, config, weights)
        return next(op.scale for op in graph.blocks[0] if isinstance(op, Attention))

    assert scale(61) == 64**-0.5
    assert scale(62) == (256 // 4) ** -0.5


def test_head_norms_take_heads_and_others_take_rows() -> None:
    graph = oracle.model("qwen3").graph()
    segments = {op.weight.role: op.segment for op in graph.blocks[0] if isinstance(op, Norm)}
    assert segments == {"attn_norm": 256, "attn_q_norm": 128, "attn_k_norm": 128, "ffn_norm": 256}


# --- mixtures ----------------------------------------------------------------------------------


def test_leading_blocks_and_every_other_one_may_be_dense() -> None:
    """As the numbers say; tensors of the other kind are then no part of the model."""
    source = oracle.model("deepseek")
    mixed = [any(isinstance(op, Route) for op in block) for block in source.graph().blocks]
    assert mixed == [False, True, True]
    config = {**source.config, "leading_dense_block_count": 0, "interleave_moe_layer_step": 2}
    numbers = Hparams.read(config).experts
    assert numbers is not None
    assert [numbers.has_block(i) for i in range(5)] == [False, True, False, True, False]
    with pytest.raises(BadModel, match=r"tensor blk\.2\.ffn_gate\.weight is missing"):
        make_graph(source.arch, config, source.weights)


def test_a_row_for_experts_serves_files_without_any() -> None:
    ops = [op for block in oracle.model("llama").graph().blocks for op in block]
    assert not any(isinstance(op, Route | ExpertMatMul) for op in ops)


def test_products_with_experts_come_last() -> None:
    """Nothing but them waits for weights of experts; and they read the rows they should."""
    for block in oracle.model("qwen2moe").graph().blocks:
        kinds = [type(op) for op in block]
        first = kinds.index(ExpertMatMul)
        assert kinds[first:] == [ExpertMatMul, ExpertMatMul, Glu, ExpertMatMul, Combine]
        gate, up, down = (op for op in block if isinstance(op, ExpertMatMul))
        assert gate.src == up.src
        assert (gate.pairs_per_row, down.pairs_per_row) == (2, 1)
        assert gate.table == down.table


def test_rows_of_experts_are_quantised_once_for_all_their_products() -> None:
    graph = oracle.model("llama-moe-q4_1").graph()
    for block in graph.blocks:
        sources = [op.reads[0].name for op in block if isinstance(op, Quantize)]
        assert sources == ["h", "attn", "h", "expert_gate"]


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("llama-moe", {"expert_count": 0}, "ffn_gate.weight is missing"),
        ("llama-moe", {"expert_count": 7}, r"ffn_gate_inp.weight has shape \[8, 256\], not \[7"),
        ("llama-moe", {"expert_count": 1025}, "expert_count is 1025, not between 0 and 1024"),
        ("llama-moe", {"expert_used_count": 9}, "expert_used_count is 9, not between 1 and 8"),
        ("llama-moe", {"expert_gating_func": 3}, "expert_gating_func is 3, which is not supp"),
        ("llama-moe", {"expert_weights_norm": 2}, "expert_weights_norm is 2, not true or false"),
        ("llama-moe", {"expert_group_count": 3}, "3, which cuts 8 experts in no equal runs"),
        ("llama-moe", {"expert_group_count": 8}, "8, which cuts 8 experts in no equal runs"),
        ("llama-moe", {"expert_group_count": 4}, "expert_group_used_count is missing"),
        (
            "llama-moe",
            {"expert_group_count": 4, "expert_group_used_count": 1, "expert_used_count": 3},
            "expert_used_count is 3, more than there are in 1 group of 2",
        ),
        ("llama-moe", {"expert_feed_forward_length": 65}, "experts of 65 times 256"),
        ("llama-moe", {"expert_feed_forward_length": 96}, r"has shape \[8, 64, 256\], not \[8, 96"),
        ("llama-moe", {"expert_shared_count": 1}, "numbers of shared experts, and no tensors"),
        ("gemma3", {"expert_count": 8, "expert_used_count": 2}, "this architecture has no exp"),
        ("qwen3", {"residual_scale": 0.5}, "residual_scale is 0.5, and this architecture scales"),
    ],
)
def test_numbers_of_mixtures_are_checked(name: str, changes: dict[str, object], match: str) -> None:
    source = oracle.model(name)
    with pytest.raises(BadModel, match=match):
        make_graph(source.arch, {**source.config, **changes}, source.weights)


def test_shared_experts_are_alike_in_all_blocks() -> None:
    source = oracle.model("granitemoe")
    widths = {"ffn_gate_shexp": "rows", "ffn_up_shexp": "rows", "ffn_down_shexp": "cols"}
    weights = [
        replace(w, **{widths[w.role]: 64}) if w.block == 1 and w.role in widths else w
        for w in source.weights
    ]
    refused(source, weights, "shared experts differ from block to block")


# --- refusals ----------------------------------------------------------------------------------


def refused(source: Source, weights: list[Weight], match: str) -> None:
    """The tensor table is refused, by name."""
    with pytest.raises(BadModel, match=match):
        make_graph(source.arch, source.config, weights, source.rope_factors)


@pytest.mark.parametrize("name", ["gemma3", "qwen2moe"])
def test_every_tensor_is_needed_or_changes_the_graph(name: str) -> None:
    source = oracle.model(name)
    optional = re.compile(r"output|.*\.bias")
    for weight in (w for w in source.weights if not optional.fullmatch(w.role)):
        rest = [w for w in source.weights if w != weight]
        refused(source, rest, rf"tensor (blk\.{weight.block}\.)?\w+\.weight is missing")


def test_a_tensor_that_no_op_reads_is_refused() -> None:
    source = oracle.model("llama")
    extra = Weight("attn_q_norm", 0, FormatCode.F32, 0, 64)
    refused(source, [*source.weights, extra], r"blk\.0\.attn_q_norm\.weight is no part of")
    beyond = Weight("attn_norm", 3, FormatCode.F32, 0, 256)
    refused(source, [*source.weights, beyond], r"blk\.3\.attn_norm\.weight is no part of")


def test_a_tensor_that_occurs_twice_is_refused() -> None:
    source = oracle.model("llama")
    refused(source, [*source.weights, source.weights[4]], "occurs twice")


def test_every_shape_is_checked() -> None:
    for name in ("llama-bias", "qwen2moe", "dots1"):
        source = oracle.model(name)
        for i, weight in enumerate(source.weights):
            wider = replace(weight, cols=weight.cols + 1)
            refused(source, [*source.weights[:i], wider, *source.weights[i + 1 :]], "has shape")
            more = replace(weight, experts=weight.experts + 1)
            if weight.rows:
                refused(source, [*source.weights[:i], more, *source.weights[i + 1 :]], "has shape")


@pytest.mark.parametrize("factors", [[1.0] * 31, [0.0] * 32, [float("nan")] * 32, None])
def test_rope_factors_are_checked(factors: list[float] | None) -> None:
    source = oracle.model("llama")
    with pytest.raises(BadModel, match="rope_freqs"):
        make_graph(source.arch, source.config, source.weights, factors)


JUNK: list[object] = [
    *(0, -1, 1, 3, 2**24, 2**31, 2**63, 10**30),
    *(0.0, 0.5, -1.5, 1e300, float("inf"), float("nan")),
    *("", "yarn", "x" * 10_000, True, False, [], [1, 2], [4, 4], [None], ["a"], [[1]]),
]


@pytest.mark.parametrize("name", oracle.FLOAT_MODELS)
def test_damaged_keys_make_a_graph_or_a_named_refusal(name: str) -> None:
    source = oracle.model(name)
    keys = {*source.config, *oracle.model("mistral3").config, *oracle.model("gemma3").config}
    keys |= {"attention.sliding_window_pattern", "attention.scale", "rope.freq_base_swa"}
    keys |= {"rope.scaling.attn_factor", "rope.scale_linear"}
    for key in sorted(keys):
        for junk in JUNK:
            check_outcome(source, {**source.config, key: junk})
        check_outcome(source, {k: v for k, v in source.config.items() if k != key})


def test_many_damaged_keys_at_once() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        source = oracle.model(rng.choice(oracle.FLOAT_MODELS))
        config = dict(source.config)
        for key in rng.sample(sorted(config), 3):
            config[key] = rng.choice(JUNK)
        check_outcome(source, config)


def check_outcome(source: Source, config: dict[str, object]) -> None:
    """A graph that holds together, or one clear line."""
    outcome: Graph | str
    try:
        outcome = make_graph(source.arch, config, source.weights, source.rope_factors)
    except BadModel as bad:
        outcome = str(bad)
    if isinstance(outcome, str):
        assert 0 < len(outcome) < 200
    else:
        outcome.check()
        assert all(b.stride_bytes < 2**20 for b in outcome.buffers())
