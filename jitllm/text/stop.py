"""Stop strings: where a reply ends because of what it says.

Knows text. Knows no tokens: a stop string may begin and end in the middle of them.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text on until a stop string is complete; holds back what may be the start of one.

    The stop string that is complete first ends the text, and of those that end together the one
    that starts first. So what comes out does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def feed(self, text: str) -> str:
        """What can be shown now that `text` has come; nothing once a stop string was found."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        self._held = ""
        if found := self._first(text):
            start, self.matched = found
            return text[:start]
        shown = len(text) - self._num_undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, at the end of the reply."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Start and name of the stop string in `text` that ends first."""
        found = [(text.find(stop), stop) for stop in self._stops]
        return min(
            ((start, stop) for start, stop in found if start >= 0),
            key=lambda hit: (hit[0] + len(hit[1]), hit[0]),
            default=None,
        )

    def _num_undecided(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
