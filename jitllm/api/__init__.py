"""The HTTP edge: OpenAI's endpoints, the control plane, health and metrics.

Knows the Engine port, tokenizers and chat templates. Knows no actor, and opens no model: whoever
starts a server hands it a `Models`.
"""
