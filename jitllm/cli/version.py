"""`jitllm version`: this program and what its answers depend on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from jitllm import __version__
from jitllm.cli.command import AsJson, verb
from jitllm.cli.screen import print_json, say

EXAMPLES = """
    jitllm version
    jitllm version -json
"""


def version(*, json: AsJson = False) -> int:
    """Print the versions of jitllm, Python and llvmlite."""
    found = {
        "version": __version__,
        "python": platform.python_version(),
        "llvmlite": _installed("llvmlite"),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    if json:
        print_json(found)
    else:
        say(
            f"jitllm {found['version']}   python {found['python']}   "
            f"llvmlite {found['llvmlite']}   {found['machine']}\n"
        )
    return 0


def _installed(name: str) -> str | None:
    try:
        return installed(name)
    except PackageNotFoundError:
        return None


command = verb(version, EXAMPLES)
