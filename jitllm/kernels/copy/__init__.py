"""Tables of copies between strided memory: what one native call reads.

No op: nothing is computed here. `cpu.py` emits the function, `jit/copy.py` calls it. Each copy is a
record of 64-bit words: destination, bytes from one row of it to the next, source, bytes from one
row of it to the next, number of rows, bytes of a row. Destinations overlap no source.
"""

from __future__ import annotations

RECORD_WORDS = 6
RECORD_BYTES = 8 * RECORD_WORDS
