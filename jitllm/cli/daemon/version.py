"""`jitllmd version`: the same as `jitllm version`."""

from jitllm.cli.version import command

__all__ = ["command"]
