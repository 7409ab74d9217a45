"""The Slang compiler: what it is asked for, what it says of mistakes, and what is kept of it."""

from __future__ import annotations

import signal
from array import array
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from jitllm.errors import JitllmError
from jitllm.jit import slang
from jitllm.jit.cache import ObjectCache
from jitllm.jit.slang import SlangCompiler, Target, definitions, without_debug_info
from jitllm.kernels.op import KernelSpec

MAGIC = 0x07230203

SOURCE = """
[shader("compute")]
[numthreads(THREADS, 1, 1)]
void kernel(uint3 thread : SV_GroupThreadID, uniform uint64_t address)
{
    ((float*)address)[thread.x] = FACTOR * BODY;
}
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of kernels with one op, `mine`."""
    pytest.importorskip("slangpy", reason="needs the extra `vulkan`")
    folder = tmp_path / "kernels"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "gpu.slang").write_text(SOURCE)
    monkeypatch.setattr(slang, "_KERNELS", folder)
    slang.sources_fingerprint.cache_clear()
    yield folder
    slang.sources_fingerprint.cache_clear()


def mine(body: str = "2.0f", **params: int | float | str | bool) -> KernelSpec:
    return KernelSpec.of("mine", threads=64, factor=0.5, body=body, **params)


def test_parameters_become_definitions() -> None:
    spec = KernelSpec.of("mine", rows=4, scale=0.1, wide=True, mode="PART")
    assert definitions(spec) == {"ROWS": "4", "SCALE": "0.1f", "WIDE": "1", "MODE": "PART"}


def test_both_targets_are_compiled(kernels: Path) -> None:
    spirv = SlangCompiler(Target.SPIRV, ObjectCache(None)).build([mine()])[mine()]
    assert array("I", spirv)[0] == MAGIC
    cuda = SlangCompiler(Target.CUDA, ObjectCache(None)).build([mine()])[mine()].decode()
    assert 'extern "C" __global__ void kernel(' in cuda
    assert str(kernels) not in cuda


def test_what_is_cached_is_not_compiled_again(kernels: Path, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "cache")
    first = SlangCompiler(Target.SPIRV, cache)
    code = first.build([mine(), mine("3.0f")])
    assert first.compiled == 2
    second = SlangCompiler(Target.SPIRV, cache)
    assert second.build([mine(), mine("3.0f")]) == code
    assert second.compiled == 0
    other = SlangCompiler(Target.CUDA, cache)
    other.build([mine()])
    assert other.compiled == 1


def test_another_source_is_compiled_again(kernels: Path, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "cache")
    SlangCompiler(Target.SPIRV, cache).build([mine()])
    (kernels / "shared.slang").write_text("// included by somebody\n")
    slang.sources_fingerprint.cache_clear()
    compiler = SlangCompiler(Target.SPIRV, cache)
    compiler.build([mine()])
    assert compiler.compiled == 1


def test_a_mistake_is_told_with_file_and_line(kernels: Path) -> None:
    (kernels / "mine" / "gpu.slang").write_text(SOURCE.replace("FACTOR", "nonsense"))
    with pytest.raises(JitllmError, match=r"mine/gpu.slang:6: undefined identifier 'nonsense'"):
        SlangCompiler(Target.SPIRV, ObjectCache(None)).build([mine()])


def test_a_missing_include_is_told(kernels: Path) -> None:
    (kernels / "mine" / "gpu.slang").write_text('#include "absent.slang"\n')
    with pytest.raises(JitllmError, match="absent.slang"):
        SlangCompiler(Target.SPIRV, ObjectCache(None)).build([mine()])


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "signal 11"),
        ("raise SystemExit('no library')", "exit code 1: no library"),
    ],
)
def test_the_death_of_the_compiler_is_a_message(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str, words: str
) -> None:
    script = tmp_path / "child.py"
    script.write_text(f"import sys\nsys.stdin.readline()\n{death}\n")
    monkeypatch.setattr(slang, "_CHILD", script)
    with pytest.raises(JitllmError, match=f"died of mine.*{words}"):
        SlangCompiler(Target.SPIRV, ObjectCache(None)).build([mine()])


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(slang.metadata, "version", absent)
    for cached in (slang.compiler_version, slang.sources_fingerprint):
        cached.cache_clear()
    with pytest.raises(JitllmError, match=r"pip install 'jitllm\[vulkan\]'"):
        SlangCompiler(Target.SPIRV, ObjectCache(None)).build([KernelSpec.of("glu")])


def test_debug_info_goes_and_nothing_else() -> None:
    header = [MAGIC, 0x10500, 0, 10, 0]
    name, source = [3 << 16 | 5, 1, 0], [3 << 16 | 3, 11, 1]
    capability, end = [2 << 16 | 17, 1], [1 << 16 | 56]
    given = array("I", [*header, *capability, *source, *name, *end])
    assert array("I", without_debug_info(given.tobytes())).tolist() == [*header, *capability, *end]
