"""The machine code of kernels."""

from __future__ import annotations

import pytest

from jitllm.cli.asm import ops
from jitllm.jit.tiers import AVX512_VNNI, NEON_DOTPROD, Tier, choose
from tests.cli.fake import Jitllm


def test_without_words_all_ops_are_listed_with_what_they_take(jitllm: Jitllm) -> None:
    done = jitllm("asm")
    assert done.code == 0
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()}
    assert sorted(rows) == ops()
    assert "Q4_K" in rows["matmul"][0].split("|")
    assert rows["norm"] == ["[add=False]", "[quantizes=False]", "[drops=False]"]
    assert rows["quantize"] == []


def test_every_op_that_is_listed_can_be_shown(jitllm: Jitllm) -> None:
    known = jitllm("asm", "-json").json["ops"]
    assert set(known) >= {"attention", "embed", "matmul", "sample", "team"}
    for op, choices in known.items():
        report = jitllm("asm", op, *choices["formats"][-1:], "-json").json
        assert report["op"] == op
        assert report["tier"] == choose().name
        assert 0 < report["instructions"] < report["assembly"].count("\n")
        assert set(choices["settings"]) <= set(report["params"])


@pytest.mark.parametrize(
    ("tier", "instruction"), [(AVX512_VNNI, "vpdpbusd"), (NEON_DOTPROD, "sdot")]
)
def test_a_tier_need_not_be_this_processors(jitllm: Jitllm, tier: Tier, instruction: str) -> None:
    done = jitllm("asm", "matmul", "q8_0", "-tier", tier.name)
    assert done.code == 0
    assert f"\t{instruction}" in done.out
    assert f"tier {tier.name}" in done.err


def test_settings_change_what_is_emitted(jitllm: Jitllm) -> None:
    plain, added = jitllm("asm", "norm").out, jitllm("asm", "norm", "add=true").out
    assert added.count("\n") > plain.count("\n")
    report = jitllm("asm", "attention", "f16", "k_dim=32", "softcap=2.5", "-json").json
    assert (report["params"]["k_dim"], report["params"]["softcap"]) == (32, 2.5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("matmull", "Q4_K"), "did you mean matmul?"),
        (("zzz",), "choose attention, "),
        (("matmul",), "matmul needs a format; choose F32, "),
        (("matmul", "Q9_K"), "matmul has no format 'Q9_K'; choose F32, "),
        (("matmul", "Q4_K", "Q8_0"), "leave 'Q8_0' out"),
        (("quantize", "f32"), "leave 'f32' out"),
        (("attention", "f16", "depth=3"), "it takes heads, "),
        (("attention", "f16", "heads=x"), "'heads=x' is no int"),
        (("norm", "add=maybe"), "'add=maybe' is no bool"),
        (("attention", "f16", "item_heads=0"), "choose other values"),
        (("glu", "silu", "-tier", "mmx"), "unknown tier 'mmx'"),
    ],
)
def test_what_makes_no_sense(jitllm: Jitllm, args: tuple[str, ...], message: str) -> None:
    done = jitllm("asm", *args)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
