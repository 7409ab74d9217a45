"""How a budget is divided between blocks and experts that are paged apart from them.

Pure functions of bytes. Every token needs all of every block, and of its experts a few: blocks come
first, but for what a token needs of experts at once.
"""

from __future__ import annotations

from jitllm.config import Experts


def are_apart(choice: Experts, weight_bytes: int, budget_bytes: int) -> bool:
    """Whether experts are paged one by one. weight_bytes: all that is to be held otherwise.

    A tenth of the budget is left for keys, values and scratch.
    """
    return choice == "apart" or (choice == "auto" and weight_bytes > budget_bytes * 9 // 10)


def expert_room(
    room_bytes: int, block_bytes: int, expert_bytes: int, used: int, all_bytes: int
) -> int:
    """Bytes for experts, one at the least.

    room_bytes: for blocks and experts together. block_bytes: what all blocks take without experts.
    expert_bytes: what the largest expert takes. used: experts of a token in a block. all_bytes:
    what all experts take.
    """
    at_once = max(min(used * expert_bytes, room_bytes // 2), expert_bytes)
    return min(max(room_bytes - block_bytes, at_once), all_bytes)
