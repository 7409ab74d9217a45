"""Products on AMX without AMX: the twin's bits, the true target's instructions, and the trial.

Where the processor has it, the tests of every tier run on it too.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jitllm.errors import UsageError
from jitllm.jit import tiers, trial, trial_child
from jitllm.jit.cache import ObjectCache
from jitllm.jit.cpu import Compiler, Emitter
from jitllm.jit.tiers import AVX512_AMX, AVX512_VNNI, PLAIN, missing
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul.reference import matmul, tile_dtype
from jitllm.kernels.op import KernelSpec
from jitllm.kernels.quantize.reference import quantize
from tests.ops import amx_twin
from tests.ops.amx_twin import TWIN, TwinCompiler
from tests.ops.harness import compiler
from tests.ops.test_matmul import Case, data_of, run

QUANTIZED = [code for code, fmt in FORMATS.items() if fmt.is_quantized]


@pytest.fixture(autouse=True)
def _without_faults() -> Iterator[None]:
    """No instruction of the twin met what a processor refuses; the registers were given back."""
    before = amx_twin.num_faults()
    yield
    assert amx_twin.num_faults() == before
    assert not amx_twin.is_on()


# --- the twin -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", QUANTIZED, ids=lambda f: f.name)
def test_any_shape_gives_the_bits_of_vectors(format: FormatCode) -> None:
    """Every number of rows around whole blocks, ragged tiles, chunks that are not whole."""
    rng = np.random.default_rng(format)
    multiple = max(FORMATS[format].col_multiple, 32)
    for tokens in (15, 16, 17, 31, 32, 33, 47, 48, 64, 79, 80, 100):
        rows, cols = int(rng.integers(1, 50)), multiple * int(rng.integers(1, 12))
        case = Case(format, rows, cols, tokens, bias=True, add="dst", seed=tokens)
        data = data_of(case)
        found = run(case, TWIN, data=data, pieces=int(rng.integers(1, 4)))
        expected = run(case, PLAIN, data=data)
        assert np.array_equal(found.view(np.int32), expected.view(np.int32)), str(case)


@pytest.mark.parametrize("format", [FormatCode.Q4_0, FormatCode.Q6_K], ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 0), (15, 0), (16, 1), (47, 2), (64, 4), (67, 4), (80, 5)]
)
def test_whole_blocks_of_rows_are_multiplied_in_the_unit(
    format: FormatCode, tokens: int, blocks: int
) -> None:
    """And no other rows: a decoded token never meets it."""
    rows, cols = 40, 512
    before = amx_twin.num_products()
    run(Case(format, rows, cols, tokens), TWIN)
    tiles, parts = -(-rows // 16), cols // FORMATS[format].scale_cols
    assert amx_twin.num_products() - before == blocks * tiles * parts


@pytest.mark.parametrize("format", QUANTIZED, ids=lambda f: f.name)
def test_extreme_integers_are_exact(format: FormatCode) -> None:
    """All weights largest or smallest, all activations at +-127, in a whole block."""
    fmt = FORMATS[format]
    case = Case(format, 16, 256, 16)
    x = np.ones((16, 256), np.float32)
    x[1::2] = -1
    x[2::4, ::2] = -1
    for fill in (0xFFFFFFFF, 0):
        raw = np.frombuffer(data_of(case).weight, np.uint8).copy()
        records = raw.view(tile_dtype(fmt))
        groups = records["groups"] if fmt.super_cols else records
        for plane in range(len(fmt.planes)):
            groups[f"plane{plane}"] = fill
        extreme = replace(data_of(case), weight=raw.tobytes(), src=quantize(x))
        found, expected = (run(case, tier, data=extreme) for tier in (TWIN, PLAIN))
        assert np.array_equal(found.view(np.int32), expected.view(np.int32))
        exact = matmul(format, extreme.weight, 16, 256, extreme.src)
        assert np.abs(found - exact).max() <= 2e-6 * np.abs(exact).max()


# --- the true target ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["matmul", "expert_matmul"])
@pytest.mark.parametrize("format", QUANTIZED, ids=lambda f: f.name)
def test_the_target_has_the_instructions(format: FormatCode, op: str) -> None:
    """In themselves, not as calls of anything."""
    spec = KernelSpec.of(op, format=format.name)
    text = Emitter(AVX512_AMX).assembly(spec)
    for instruction in ("ldtilecfg", "tileloadd", "tdpbssd", "tilestored", "tilerelease"):
        assert f"\t{instruction}" in text
    assert "\tcall" not in text
    assert "\tvpdpbusd" in text  # rows that are no block
    assert "tdpbssd" not in Emitter(AVX512_VNNI).assembly(spec)


def test_floats_and_other_ops_have_none_of_them() -> None:
    for spec in (KernelSpec.of("matmul", format="F16"), KernelSpec.of("quantize")):
        assert "tmm" not in Emitter(AVX512_AMX).assembly(spec)


# --- the trial ------------------------------------------------------------------------------------


def child(program: str) -> tuple[str, ...]:
    """A process in the place of a trial."""
    return (sys.executable, "-c", program)


FAILING = [
    (child("import os; os.kill(os.getpid(), 4)"), "its trial ended with: Illegal instruction"),
    (child("import os; os.abort()"), "its trial ended with: Aborted"),
    (child("import sys; sys.exit('no room')"), "its trial failed: no room"),
    (child("import sys; sys.exit(3)"), "its trial failed: exit code 3"),
    (child("print('different')"), "its products are not those of avx512-vnni"),
    (child("print('not permitted')"), "its trial said 'not permitted'"),
    (child(""), "its trial said ''"),
    (("/no/such/program",), "its trial failed: [Errno 2] No such file"),
]
EQUAL = child("print('equal')")


@pytest.mark.parametrize(("command", "why"), FAILING, ids=[why for _, why in FAILING])
def test_a_trial_that_fails_says_why_and_is_tried_again(
    command: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    kept = ObjectCache(tmp_path)
    for _ in range(2):
        assert trial.tried(kept, command).startswith(why)
    assert kept.entries() == []


def test_a_trial_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LONGEST_S", 0.1)
    forever = child("import time; time.sleep(600)")
    assert "timed out after 0.1 seconds" in trial.tried(ObjectCache(tmp_path), forever)


def test_a_trial_that_passed_is_remembered_for_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, (failing, why) = ObjectCache(tmp_path), FAILING[0]
    assert trial.tried(kept, EQUAL) == ""
    assert trial.tried(kept, failing) == ""
    monkeypatch.setattr(tiers, "cpu_name", lambda: "another processor")
    assert trial.tried(kept, failing) == why


@pytest.fixture
def processor_with_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The system lists AMX and permits it; nothing was tried yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiers, "cpu_flags", lambda: frozenset(AVX512_AMX.needs))
    monkeypatch.setattr(trial, "permit", lambda: True)
    trial.obstacle.cache_clear()
    yield
    trial.obstacle.cache_clear()


@pytest.mark.usefixtures("processor_with_amx")
def test_auto_takes_amx_after_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "COMMAND", EQUAL)
    assert tiers.choose() == tiers.choose("avx512-amx") == AVX512_AMX
    assert tiers.choose("avx512-vnni") == AVX512_VNNI


@pytest.mark.usefixtures("processor_with_amx")
def test_a_failed_trial_leaves_vectors_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command, why = FAILING[0]
    monkeypatch.setattr(trial, "COMMAND", command)
    with caplog.at_level(logging.WARNING, "jitllm"):
        assert [tiers.choose() for _ in range(3)] == [AVX512_VNNI] * 3
    assert caplog.messages == [f"tier avx512-amx is not used: {why}"]
    with pytest.raises(UsageError, match=f"tier avx512-amx cannot be used: {why}; choose auto or"):
        tiers.choose("avx512-amx")


@pytest.mark.usefixtures("processor_with_amx")
def test_without_permission_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "permit", lambda: False)
    monkeypatch.setattr(trial, "COMMAND", EQUAL)
    assert tiers.choose() == AVX512_VNNI
    assert tiers.obstacle(AVX512_AMX) == "the system does not permit tile registers"


@pytest.mark.usefixtures("processor_with_amx")
def test_another_tier_by_name_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from jitllm.compose import resolve_config
    from jitllm.config import EngineConfig

    monkeypatch.setattr(trial, "_try", lambda command: pytest.fail("tried"))
    assert resolve_config(EngineConfig(tier="avx512-vnni")).tier == "avx512-vnni"


def test_the_trial_sees_a_wrong_product() -> None:
    """The comparison itself, on the twin: a last bit of an integer is enough."""
    reference = compiler(PLAIN)
    assert trial_child.agree(TwinCompiler(), reference)
    assert not trial_child.agree(TwinCompiler(mistake=1), reference)


@pytest.mark.skipif(not missing(AVX512_AMX), reason="this processor has AMX")
def test_what_the_system_does_not_permit_is_not_run(tmp_path: Path) -> None:
    """The command that processes use, and the system's own answer, here and in the child."""
    assert not trial.permit()
    found = trial.tried(ObjectCache(tmp_path), trial.COMMAND)
    assert found == "its trial said 'not permitted'"


@pytest.mark.skipif(
    platform.machine() != "x86_64" or bool(missing(AVX512_VNNI)), reason="no x86 with AVX-512"
)
@pytest.mark.skipif(not missing(AVX512_AMX), reason="this processor has AMX")
def test_on_a_processor_without_it_the_trial_ends_by_a_signal(tmp_path: Path) -> None:
    """The true child, compiled for the true target, but for the permission."""
    program = "from jitllm.jit import trial, trial_child; trial.permit = lambda: True; "
    kept = ObjectCache(tmp_path)
    assert trial.tried(kept, child(program + "trial_child.main()")) == FAILING[0][1]


@pytest.mark.skipif(bool(missing(AVX512_AMX)), reason="the processor lacks amx_tile, amx_int8")
def test_this_processor_passes_its_trial(tmp_path: Path) -> None:
    """And a compiler of this process may run the code."""
    assert trial.permit()
    assert trial.tried(ObjectCache(tmp_path), trial.COMMAND) == ""
    assert trial_child.agree(Compiler(AVX512_AMX, ObjectCache(None)), compiler(PLAIN))
