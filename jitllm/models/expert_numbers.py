"""The numbers of a mixture of experts, taken from its file's keys and checked one by one.

Knows keys, ranges and defaults. Knows no architecture and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.route import MAX_EXPERTS
from jitllm.models.keys import BadModel, Keys
from jitllm.models.spec import RouterScore
from jitllm.units import counted

MAX_USED_EXPERTS = 64
MAX_WIDTH = 2**20
MAX_STEP = 4096


@dataclass(frozen=True, slots=True)
class ExpertNumbers:
    """The numbers of a mixture.

    count: experts of a block. used: by each token. width: elements of an expert's feed-forward
    layer. groups, groups_used: runs of experts, and how many of them a token chooses from; 1 and 1
    for no such cut. scale: of the weights. score, is_normalised: None where the file is silent.
    first_block: blocks before it are dense; of the others, every every-th one is a mixture, counted
    from the first block of the model. has_shared: some experts are for every token.
    """

    count: int
    used: int
    width: int
    groups: int
    groups_used: int
    scale: float
    score: RouterScore | None
    is_normalised: bool | None
    first_block: int
    every: int
    has_shared: bool

    def has_block(self, block: int) -> bool:
        """Whether a block is a mixture."""
        return block >= self.first_block and (block + 1) % self.every == 0

    @staticmethod
    def read(keys: Keys, num_blocks: int, ffn_width: int) -> ExpertNumbers | None:
        """`expert_*`, where there are experts. Raises BadModel."""
        count = keys.count("expert_count", MAX_EXPERTS, default=0, least=0)
        if not count:
            return None
        used = keys.count("expert_used_count", min(count, MAX_USED_EXPERTS))
        groups, groups_used = _expert_groups(keys, count, used)
        return ExpertNumbers(
            count=count,
            used=used,
            width=keys.count("expert_feed_forward_length", MAX_WIDTH, default=ffn_width),
            groups=groups,
            groups_used=groups_used,
            scale=keys.scale("expert_weights_scale"),
            score=_score(keys),
            is_normalised=keys.truth("expert_weights_norm"),
            first_block=keys.count("leading_dense_block_count", num_blocks, default=0, least=0),
            every=keys.count("interleave_moe_layer_step", MAX_STEP, default=1),
            has_shared=any(
                keys.count(key, MAX_WIDTH, default=0, least=0)
                for key in ("expert_shared_count", "expert_shared_feed_forward_length")
            ),
        )


_SCORES = {1: RouterScore.SOFTMAX, 2: RouterScore.SIGMOID}
"""By `expert_gating_func`."""


def _score(keys: Keys) -> RouterScore | None:
    key = "expert_gating_func"
    number = keys.count(key, 2**31 - 1, default=0, least=0)
    if number and number not in _SCORES:
        known = ", ".join(f"{n} ({score})" for n, score in _SCORES.items())
        raise BadModel(f"{key} is {number}, which is not supported (supported: {known})")
    return _SCORES.get(number)


def _expert_groups(keys: Keys, count: int, used: int) -> tuple[int, int]:
    """Equal runs of at least two experts, of which those that are used hold enough."""
    key = "expert_group_count"
    groups = keys.count(key, count, default=0, least=0)
    if groups <= 1:
        return 1, 1
    if count % groups or count == groups:
        raise BadModel(f"{key} is {groups}, which cuts {counted(count, 'expert')} in no equal runs")
    groups_used = keys.count("expert_group_used_count", groups)
    if used > groups_used * (count // groups):
        held = f"{counted(groups_used, 'group')} of {count // groups}"
        raise BadModel(f"expert_used_count is {used}, more than there are in {held}")
    return groups, groups_used
