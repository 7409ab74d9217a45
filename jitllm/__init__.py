"""jitllm runs large language models the way an operating system runs processes.

Blocks of a model are paged, placed on devices and moved between them in the middle of a reply.
`docs/map.md` says which module does what.
"""

__version__ = "0.1.0"
