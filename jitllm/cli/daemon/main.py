"""`jitllmd`: finds the verb and runs it, as `jitllm` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jitllm.cli import main as jitllm

VERBS = ("serve", "run", "models", "sessions", "place", "stats", "devices", "version")
"""A module of this package for each, in the order of `jitllmd -help`."""

JITLLMD = jitllm.Program(
    "jitllmd",
    "jitllm.cli.daemon",
    VERBS,
    "Serve language models over HTTP, and talk to such a server.",
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (by default the process's) and return its exit code."""
    return jitllm.main(args, JITLLMD)


if __name__ == "__main__":
    sys.exit(main())
