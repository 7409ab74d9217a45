"""Every message and what answers it, a module for each receiver.

They know plain values. A message carries handles (addresses, names), never bytes, and is frozen:
sender and receiver may be in one process or in two.
"""
