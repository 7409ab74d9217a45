"""Wires the feed-forward layer of a block with experts: router, shared experts, chosen experts.

Knows which op follows which. Knows no architecture. Everything but the products with chosen experts
comes before them: these may still be on their way into memory meanwhile.
"""

from __future__ import annotations

from jitllm.kernels.combine import Combine
from jitllm.kernels.dispatch import Dispatch
from jitllm.kernels.glu import Glu
from jitllm.kernels.layout import GROUP
from jitllm.kernels.op import Buffer, Element
from jitllm.kernels.route import Route
from jitllm.models.hparams import BadModel, ExpertNumbers
from jitllm.models.spec import Activation, Experts, RouterScore
from jitllm.models.wires import Ops, Tensors


class Mixture:
    """The experts of a model, as they are in each block that has some."""

    def __init__(
        self,
        numbers: ExpertNumbers,
        experts: Experts,
        activation: Activation,
        width: int,
        tensors: Tensors,
    ) -> None:
        """Raises BadModel where a row of an expert is not a number of whole groups."""
        if (numbers.width | width) % GROUP:
            raise BadModel(
                f"experts of {numbers.width} times {width}, where only multiples of {GROUP} work"
            )
        self.numbers = numbers
        self.experts = experts
        self.activation = activation
        self.width = width
        used = numbers.used
        self.logits = Buffer("router", numbers.count)
        self.ids = Buffer("expert_ids", used, element=Element.I32)
        self.routed = Buffer("expert_weights", used)
        self.table = Dispatch.table_buffer("expert_table", used)
        self.gate = Buffer("expert_gate", used * numbers.width)
        self.up = Buffer("expert_up", used * numbers.width)
        self.out = Buffer("expert_out", used * width)
        shared_width = self._shared_width(tensors)
        self.shared_gate = Buffer("shared_gate", shared_width)
        self.shared_up = Buffer("shared_up", shared_width)

    def add_to(self, ops: Ops, src: Buffer, dst: Buffer, add: Buffer | None, scale: float) -> None:
        """dst = what the experts of each row of src say, times scale, plus `add` (dst, if any)."""
        self._route(ops, src)
        if self.shared_gate.width:
            self._ask_shared(ops, src, dst, add, scale)
            add = dst
        self._ask_chosen(ops, src)
        ops.add(Combine(self.out, self.routed, dst, add, scale))

    def _route(self, ops: Ops, src: Buffer) -> None:
        numbers, experts = self.numbers, self.experts
        ops.product("ffn_gate_inp", src, self.logits)
        is_normalised = numbers.is_normalised
        ops.add(
            Route(
                self.logits,
                self.ids,
                self.routed,
                score=numbers.score or experts.score,
                bias=ops.tensors.optional_vector("exp_probs_b.bias", ops.block, numbers.count),
                groups=numbers.groups,
                groups_used=numbers.groups_used,
                is_normalised=experts.is_normalised if is_normalised is None else is_normalised,
                scale=numbers.scale,
            )
        )
        ops.add(Dispatch(self.ids, self.table, numbers.count))

    def _ask_chosen(self, ops: Ops, src: Buffer) -> None:
        count, width = self.numbers.count, self.numbers.width
        into, back = (count, width, self.width), (count, self.width, width)
        ops.expert_product("ffn_gate_exps", src, self.gate, into, self.table)
        ops.expert_product("ffn_up_exps", src, self.up, into, self.table)
        ops.add(Glu(self.gate, self.up, self.gate, self.activation))
        ops.expert_product("ffn_down_exps", self.gate, self.out, back, self.table)

    def _ask_shared(
        self, ops: Ops, src: Buffer, dst: Buffer, add: Buffer | None, scale: float
    ) -> None:
        """The experts that every token goes to, which files keep as a single one."""
        ops.product("ffn_gate_shexp", src, self.shared_gate)
        ops.product("ffn_up_shexp", src, self.shared_up)
        ops.add(Glu(self.shared_gate, self.shared_up, self.shared_gate, self.activation))
        if not self.experts.shared_gate:
            ops.product("ffn_down_shexp", self.shared_gate, dst, add, scale)
            return
        # The gate of a single expert is a router that has no choice.
        out, logit = Buffer("shared_out", self.width), Buffer("shared_router", 1)
        ids, routed = Buffer("shared_ids", 1, element=Element.I32), Buffer("shared_weight", 1)
        ops.product("ffn_down_shexp", self.shared_gate, out)
        ops.product("ffn_gate_inp_shexp", src, logit)
        ops.add(Route(logit, ids, routed, score=RouterScore.SIGMOID))
        ops.add(Combine(out, routed, dst, add, scale))

    def _shared_width(self, tensors: Tensors) -> int:
        """Elements of the shared experts' layer, the same in all blocks; 0 where there are none."""
        widths = {tensors.rows("ffn_up_shexp", block) for block in tensors.blocks}
        widths -= {0}
        if len(widths) > 1:
            raise BadModel("shared experts differ from block to block, which no graph supports")
        if self.numbers.has_shared and not widths:
            raise BadModel("there are numbers of shared experts, and no tensors of them")
        return widths.pop() if widths else 0
