"""The example programs run as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_generate_streams_and_pays_for_a_lower_budget(tiny_model: Callable[..., Path]) -> None:
    """The reply comes, and after half of it blocks are paged."""
    command = [sys.executable, str(EXAMPLES / "generate.py"), str(tiny_model("gemma3")), "hello"]
    done = subprocess.run(
        [*command, "--max-tokens", "200"], capture_output=True, text=True, timeout=120, check=True
    )
    report = done.stdout.splitlines()[-1]
    assert "of 7 blocks resident" in report
    page_ins = int(report.split(" page-ins")[0].split()[-1])
    assert page_ins > 7


def test_relocate_moves_blocks_and_the_reply_stays_the_same(
    tiny_model: Callable[..., Path],
) -> None:
    command = [sys.executable, str(EXAMPLES / "relocate.py"), str(tiny_model("gemma3")), "hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    *_, odd, there, back, same = done.stdout.splitlines()
    assert odd.startswith("blocks 0,2,4,6 to cpu:1: ")
    assert there.startswith("blocks 1,3,5 and the head to cpu:1: ")
    assert back.startswith("blocks 0-6 and the head to cpu:0: ")
    assert same == "the same tokens"
