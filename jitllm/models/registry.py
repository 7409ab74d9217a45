"""Every architecture there is, and the way from a container's header to a graph.

Knows the rows. Knows no wiring. Run as a program it prints `docs/models.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from jitllm.errors import BadContainer, UnsupportedModel
from jitllm.formats.jlm import Container
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.op import Weight
from jitllm.models.arch.bailingmoe import BAILING_MOE, BAILING_MOE2
from jitllm.models.arch.deepseek import DEEPSEEK
from jitllm.models.arch.dots1 import DOTS1
from jitllm.models.arch.ernie4_5 import ERNIE4_5_MOE
from jitllm.models.arch.gemma3 import GEMMA3
from jitllm.models.arch.glm4moe import GLM4_MOE
from jitllm.models.arch.granite import GRANITE, GRANITE_MOE
from jitllm.models.arch.hunyuan import HUNYUAN_MOE
from jitllm.models.arch.llama import LLAMA
from jitllm.models.arch.mellum import MELLUM
from jitllm.models.arch.minimax_m2 import MINIMAX_M2
from jitllm.models.arch.mistral3 import MISTRAL3
from jitllm.models.arch.olmoe import OLMOE
from jitllm.models.arch.qwen2 import QWEN2, QWEN2_MOE
from jitllm.models.arch.qwen3 import QWEN3, QWEN3_MOE
from jitllm.models.build import build
from jitllm.models.graph import Graph
from jitllm.models.hparams import MAX_HEAD_DIM, BadModel, Config, Hparams
from jitllm.models.spec import Spec

SPECS: dict[str, Spec] = {
    s.name: s
    for s in (
        *(BAILING_MOE, BAILING_MOE2, DEEPSEEK, DOTS1, ERNIE4_5_MOE, GEMMA3, GLM4_MOE, GRANITE),
        *(GRANITE_MOE, HUNYUAN_MOE, LLAMA, MELLUM, MINIMAX_M2, MISTRAL3, OLMOE, QWEN2, QWEN2_MOE),
        *(QWEN3, QWEN3_MOE),
    )
}
"""Rows by the name that their files carry."""


class Tensor(Protocol):
    """What a graph needs to know of an entry of a tensor table."""

    @property
    def role(self) -> str: ...

    @property
    def block(self) -> int | None: ...

    @property
    def format(self) -> FormatCode: ...

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def experts(self) -> int: ...


def spec_of(arch: str) -> Spec:
    """The row of an architecture. Raises UnsupportedModel, which lists all rows."""
    if arch not in SPECS:
        raise UnsupportedModel("architecture", arch, SPECS)
    return SPECS[arch]


def make_graph(
    arch: str,
    config: Config,
    tensors: Iterable[Tensor],
    rope_factors: Sequence[float] | None = None,
) -> Graph:
    """The graph of a model, from plain values; `rope_factors` are the values of `rope_freqs`.

    Raises UnsupportedModel for an architecture without a row, BadModel for keys or tensors that
    do not fit it.
    """
    weights = [weight_of(tensor) for tensor in tensors]
    return build(spec_of(arch), Hparams.read(config), weights, rope_factors)


def weight_of(tensor: Tensor) -> Weight:
    """A tensor table's entry, as ops name it."""
    return Weight(
        tensor.role, tensor.block, tensor.format, tensor.rows, tensor.cols, tensor.experts
    )


def graph_of(container: Container) -> Graph:
    """The graph of an open container; of its extents it reads `rope_freqs` only.

    Raises UnsupportedModel, and BadContainer for what does not fit together.
    """
    header = container.header
    try:
        factors = _rope_factors(container)
        return make_graph(header.arch, header.config, header.tensors, factors)
    except BadModel as bad:
        raise BadContainer(container.path, str(bad)) from bad


def _rope_factors(container: Container) -> tuple[float, ...] | None:
    """The values of `rope_freqs`, if there is one; the graph checks their number and range."""
    for tensor in container.header.tensors:
        if tensor.role == "rope_freqs" and tensor.block is None:
            if tensor.rows or tensor.cols > MAX_HEAD_DIM:
                raise BadModel(f"tensor {tensor.name} has more values than a head")
            return struct.unpack_from(f"<{tensor.cols}f", container.read(tensor))
    return None


# --- docs/models.md ---------------------------------------------------------------------------

_PAGE = """\
# Models

This page is generated: `python -m jitllm.models.registry > docs/models.md`.

An architecture is a row in `jitllm/models/arch/`; its numbers come from the file. Biases, a tied
head and rotary frequency factors need no entry here: they are there when the file has them.
Rotary scaling is none, linear or YaRN, as the file says. Experts are there when the file counts
some (`expert_count`): how many, how many a token uses, their groups, leading dense blocks, shared
experts and the scale of weights are the file's to say; what the table says of them is for files
that are silent.

{architectures}

Weight formats, in any mixture: {formats}. Float weights meet f32 activations, all others meet
activations quantised in groups of 32.
"""

_COLUMNS: dict[str, Callable[[Spec], str]] = {
    "architecture": lambda s: f"`{s.name}`",
    "rotated pairs": lambda s: s.attention.rope.value,
    "norm of queries and keys": lambda s: _norm(s),
    "local blocks": lambda s: _local(s),
    "temperature": lambda s: _tick(s.attention.has_temperature),
    "activation": lambda s: s.feed_forward.activation.value,
    "post norms": lambda s: _tick(s.post_norms),
    "scaled": lambda s: _scales(s),
    "experts": lambda s: _experts(s),
}


def describe() -> str:
    """The text of `docs/models.md`."""
    rows = [[show(spec) for show in _COLUMNS.values()] for spec in SPECS.values()]
    lines = [list(_COLUMNS), ["---"] * len(_COLUMNS), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return _PAGE.format(architectures=table, formats=", ".join(f.name for f in FORMATS.values()))


def _tick(has: bool) -> str:
    return "yes" if has else "-"


def _norm(spec: Spec) -> str:
    attention = spec.attention
    after = " after rotation" if attention.norm_after_rope else ""
    optional = ", if there" if attention.optional_norm else ""
    return f"{attention.qk_norm}{after}{optional}"


def _scales(spec: Spec) -> str:
    return "by file" if spec.scaled_by_file else "embedding" if spec.scaled_embedding else "-"


def _experts(spec: Spec) -> str:
    experts = spec.experts
    if experts is None:
        return "-"
    parts = [experts.score.value]
    parts += ["normalised"] * experts.is_normalised + ["shared gate"] * experts.shared_gate
    return ", ".join(parts)


def _local(spec: Spec) -> str:
    local = spec.attention.local
    return f"{local.period - 1} of {local.period}" if local else "-"


if __name__ == "__main__":
    print(describe(), end="")
