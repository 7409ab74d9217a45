"""Every kernel in every weight format compiles for NVIDIA cards, without one: Slang makes CUDA C++
of it, NVRTC compiles that. What the kernels compute is tested on Vulkan, from the same source."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import jitllm.kernels
from jitllm.devices.vulkan.program import op_launches
from jitllm.errors import JitllmError
from jitllm.jit.cache import ObjectCache, default_directory
from jitllm.jit.slang import SlangCompiler, Target, compiler_version
from jitllm.kernels.attention import Attention
from jitllm.kernels.combine import Combine
from jitllm.kernels.copy import gpu as copying
from jitllm.kernels.dispatch import Dispatch
from jitllm.kernels.embed import Embed
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.gather import Gather
from jitllm.kernels.glu import Glu
from jitllm.kernels.gpu import Bucket
from jitllm.kernels.kv_write import KvWrite
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Buffer, Const, Element, KernelSpec, Op, Rows, Weight
from jitllm.kernels.quantize import Quantize
from jitllm.kernels.rope import Rope
from jitllm.kernels.rope_table import RopeTable
from jitllm.kernels.route import Route
from jitllm.kernels.sample import Sample
from jitllm.kernels.table import Nowhere

ARCHITECTURES = ("sm_75", "sm_90")


def ops() -> Iterator[Op]:
    """Every op, with the settings that its kernel is specialised for."""
    wide = Buffer("wide", 1024)
    for format in FormatCode:
        table = Weight("table", None, format, 48, 1024)
        yield Embed(table, wide)
        element = Element.Q8 if FORMATS[format].is_quantized else Element.F32
        src, dst = Buffer("src", 1024, element=element), Buffer("dst", 48)
        yield MatMul(src, dst, table)
        yield MatMul(src, dst, table, Weight("bias", 0, FormatCode.F32, 0, 48), dst)
        bank = Weight("bank", 0, format, 64, 1024, experts=64)
        yield ExpertMatMul(src, Buffer("said", 256), bank, Dispatch.table_buffer("pairs", 4), 4)
    gain = Weight("gain", 0, FormatCode.F32, 0, 1024)
    yield Norm(wide, wide, gain, 1e-6, 1024)
    yield Norm(wide, wide, gain, 1e-6, 1023, wide)
    yield Quantize(wide, Buffer("q8", 1024, element=Element.Q8))
    angles = Buffer("angles", 64)
    yield RopeTable(angles, Const("f", np.ones(32).tobytes()))
    for is_interleaved in (False, True):
        yield Rope(wide, angles, 64, 64, is_interleaved)
        yield Rope(wide, angles, 128, 64, is_interleaved, Const("s", bytes(16)))
    yield KvWrite(wide, wide, 0, 16, 64, 64)
    yield Attention(wide, wide, 0, 16, 4, 64, 64, 0.125)
    yield Attention(wide, wide, 0, 8, 1, 128, 128, 0.125, window=512, softcap=50.0)
    yield Glu(wide, wide, wide, "silu")
    yield Glu(wide, wide, wide, "gelu")
    yield Gather(wide, Buffer("last", 1024, Rows.OUTPUTS))
    ids, routed = Buffer("ids", 4, element=Element.I32), Buffer("routed", 4)
    for score in ("softmax", "sigmoid"):
        yield Route(Buffer("scores", 64), ids, routed, score)
        yield Route(Buffer("scores", 64), ids, routed, score, gain, 8, 2, is_normalised=True)
    yield Dispatch(ids, Dispatch.table_buffer("pairs", 4), 64)
    yield Combine(Buffer("said", 4096), routed, wide, wide)
    logits = Buffer("logits", 1000, Rows.OUTPUTS)
    yield Sample(logits, Sample.scratch_buffer("scratch", 1000))


def kernels() -> list[KernelSpec]:
    """Every kernel that those ops are launched with, for one token and for many; and what copies
    history, which is no op."""
    found = dict.fromkeys(
        launch.kernel
        for op in ops()
        for kv_element in ("f16", "f32", "q8_0")
        for bucket in (Bucket(1, 1), Bucket(512, 64))
        for launch in op_launches(op, Nowhere(kv_element), bucket)
    )
    return [*found, *(copying.kernel(Nowhere.traits, unit_bytes) for unit_bytes in (2, 4))]


@cache
def obstacle() -> str:
    """Why nothing compiles here, or nothing."""
    try:
        compiler_version()
    except JitllmError as error:
        return str(error)
    return ""


@cache
def nvrtc() -> tuple[ctypes.CDLL, Path]:
    """NVIDIA's compiler and the folder of its headers."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations if spec else None) or ()]
    libraries = [lib for root in roots for lib in root.glob("cuda_nvrtc/lib/libnvrtc.so.*")]
    headers = [root / "cuda_runtime/include" for root in roots]
    headers = [folder for folder in headers if (folder / "cuda_fp16.h").exists()]
    if not libraries or not headers:
        pytest.skip("needs the packages nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12")
    return ctypes.CDLL(str(libraries[0])), headers[0]


def compiled(source: bytes, architecture: str) -> tuple[bytes, str]:
    """Machine code of CUDA C++, or nothing and what NVRTC says."""
    library, headers = nvrtc()
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None)
    options = [
        f"--gpu-architecture={architecture}".encode(),
        f"--include-path={headers}".encode(),
        b"--define-macro=SLANG_CUDA_ENABLE_HALF",
        b"--fmad=false",
        b"--disable-warnings",
    ]
    library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))

    def take(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, data)
        return data.raw

    code, log = take("CUBIN"), take("ProgramLog").decode(errors="replace")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log


def test_every_kernel_is_listed() -> None:
    """A folder with a GPU kernel is in the list above, in every format where it has formats."""
    folders = {path.parent.name for path in Path(jitllm.kernels.__path__[0]).glob("*/gpu.slang")}
    assert {spec.op for spec in kernels()} == folders
    for op in ("embed", "matmul", "expert_matmul"):
        layouts = {
            tuple((k, v) for k, v in spec.params if k in ("float_kind", "bits_low", "bits_high",
                  "scales", "has_min", "min_added", "super_groups", "scale_signed"))
            for spec in kernels() if spec.op == op
        }  # fmt: skip
        assert len(layouts) == len(FormatCode)


@pytest.mark.slow
@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("spec", kernels(), ids=lambda spec: spec.symbol[:60])
def test_kernel_compiles(spec: KernelSpec, architecture: str) -> None:
    compiler = SlangCompiler(Target.CUDA, ObjectCache(default_directory()))
    code, log = compiled(compiler.build([spec])[spec], architecture)
    assert code.startswith(b"\x7fELF"), log
