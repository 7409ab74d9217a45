"""jitllm runs large language models the way an operating system runs processes.

Blocks of a model are paged, placed on devices and moved between them in the middle of a reply.
`connect` gives a program a model, wherever it is. `docs/map.md` says which module does what.
"""

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost more than us
if TYPE_CHECKING:
    from jitllm.handle import connect, connect_sync

__all__ = ["__version__", "connect", "connect_sync"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """What is imported when it is first asked for."""
    if name in ("connect", "connect_sync"):
        from jitllm import handle

        return getattr(handle, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
