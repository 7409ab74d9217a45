"""The actors that run a model: scheduler, devices and pager, and the runtimes that carry them.

They implement the port of `jitllm.engine`. Only `jitllm.compose` imports this package; it knows
no HTTP, no screen and no command line, and only `actors.ray` knows Ray.
"""
