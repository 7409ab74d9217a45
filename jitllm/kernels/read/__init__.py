"""No op: the plain read loop that the bandwidth of a machine is measured with.

It reads bytes one after the other and keeps their exclusive or, so that nothing is left out.
"""

CHUNK_BYTES = 256 << 10
"""Bytes of a work item."""

SUM_BYTES = 64
"""What is written for each of them: 16 words, each the exclusive or of every 16th word."""
