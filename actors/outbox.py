"""What a device hands to others, and where it reads what they hand to it.

Knows memory of this process and of others. Knows neither hidden states, experts nor history.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import c_char_p, c_void_p, cast, string_at

from actors.mailbox import Lost
from actors.messages.device import Carried, Slice
from jitllm.devices import memory
from jitllm.errors import JitllmError


class Outbox:
    """See above. span: memory that others read. step_bytes: the part of it that what a step hands
    on leaves through; parcels of history do behind it."""

    def __init__(self, span: memory.Span, step_bytes: int) -> None:
        self._span = span
        self._step_bytes = step_bytes
        self.name = ""
        """What the device is called."""
        self._attachments = ExitStack()
        self._attached: dict[memory.Handle, int] = {}

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self._span.num_bytes

    @property
    def step_address(self) -> int:
        """Where what a step hands on is to be written."""
        return self._span.address

    @property
    def parcel_address(self) -> int:
        """Where a parcel is."""
        return self._span.address + self._step_bytes

    def of_step(self, num_bytes: int, *, inline: bool) -> Carried:
        """What was written of a step, for whoever asked. inline: as bytes."""
        return self._carried(0, num_bytes, inline=inline)

    def parcel(self, num_bytes: int, *, inline: bool) -> Carried:
        """A parcel that was written."""
        return self._carried(self._step_bytes, num_bytes, inline=inline)

    def _carried(self, offset: int, num_bytes: int, *, inline: bool) -> Carried:
        if inline:
            return string_at(self._span.address + offset, num_bytes)
        return Slice(self._span.handle(), offset, num_bytes)

    @contextmanager
    def readable(self, data: Carried) -> Iterator[int]:
        """Where it can be read within the block. Raises `Lost` at its end for what had gone."""
        if isinstance(data, bytes):
            yield cast(c_char_p(data), c_void_p).value or 0
            return
        yield self._address(data)
        if not memory.holds(data.handle):
            raise Lost(self.name, "what it was handed had gone before it could read it")

    def _address(self, piece: Slice) -> int:
        """Where bytes of another device can be read here."""
        if piece.handle not in self._attached:
            try:
                attached = self._attachments.enter_context(memory.attach(piece.handle))
            except JitllmError as error:  # who handed it on has died since
                problem = f"it could not read what it was handed: {error}"
                raise Lost(self.name, problem) from error
            self._attached[piece.handle] = attached
        return self._attached[piece.handle] + piece.offset

    def detach(self) -> None:
        """Memory of others is not read any more."""
        self._attachments.close()
        self._attached.clear()
