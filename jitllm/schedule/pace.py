"""How many tokens of prompts a step takes beside replies under way, so that those do not falter.

A line is fitted to what steps took: seconds = a + b * prompt tokens, recent steps counting more. A
step with prompts may then take COST times what one without them takes. Knows counts and seconds.
Reads no clock.
"""

from __future__ import annotations

COST = 1.6
"""What a step may take with prompts in it, as a multiple of one without: replies under way shall
slow down by half at the most, and the fit is not exact."""

MAX_STEP_S = 0.05
"""Longest step while someone waits for the next one and nobody is in the middle of a reply."""

FIRST_TOKENS = 8
"""Prompt tokens beside replies while it is not known what they cost."""

MIN_TOKENS = 4
"""Fewest prompt tokens beside replies: a prompt always moves on."""

ROW_TOKENS = 8
"""More than so many are a multiple of it: kernels compute that many rows at a time."""

PANEL_TOKENS = 64
"""Fewest prompt tokens of a step without replies."""

_DECAY = 0.9  # of the weight of a step, with each one that follows
_MIN_SPREAD_TOKENS = 2.0  # standard deviation of token counts that a slope can be read from
_OUTLIER = 4.0  # times what was expected; a stall of the machine says nothing about tokens


class Line:
    """Seconds of a step over its prompt tokens, by decayed regression."""

    def __init__(self) -> None:
        self.slope: float | None = None
        """Seconds for each token; None until steps differed enough. The last one that could be
        read is kept while they do not."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Take a step in."""
        if self._weight and (expected := self.at(tokens)) > 0:
            if seconds < expected / _OUTLIER:  # what was seen before is of no use
                self._weight = self._x = self._y = self._xx = self._xy = 0.0
            seconds = min(seconds, _OUTLIER * expected)
        self._weight = _DECAY * self._weight + 1
        self._x = _DECAY * self._x + tokens
        self._y = _DECAY * self._y + seconds
        self._xx = _DECAY * self._xx + tokens * tokens
        self._xy = _DECAY * self._xy + tokens * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance >= _MIN_SPREAD_TOKENS**2:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            if slope > 0:
                self.slope = slope

    @property
    def most(self) -> float | None:
        """A slope that is not too small, from any steps with tokens: as if they were all it took."""
        return self._y / self._x if self._x else None

    def at(self, tokens: int) -> float:
        """Seconds that a step of so many prompt tokens should take; 0 when nothing is known."""
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        if self.slope is None:
            return mean_y
        return max(mean_y + self.slope * (tokens - mean_x), 0.0)


class Pace:
    """What a scheduler learnt about the steps of its device.

    max_tokens: the most prompt tokens of any step.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._beside = Line()
        self._alone = Line()

    def observe(self, num_replies: int, prompt_tokens: int, seconds: float) -> None:
        """A step with so many rows of replies and so many tokens of prompts took `seconds`."""
        (self._beside if num_replies else self._alone).add(prompt_tokens, seconds)

    def prompt_tokens(self, num_replies: int, others_wait: bool) -> int:
        """Most prompt tokens of the next step.

        num_replies: rows that are in the middle of a reply. others_wait: someone besides the first
        prompt would like to be computed.
        """
        if num_replies:
            return self._beside_replies()
        return self._without_replies() if others_wait else self._max_tokens

    def _beside_replies(self) -> int:
        slope = self._beside.slope or self._alone.slope or self._alone.most
        if slope is None:
            return min(FIRST_TOKENS, self._max_tokens)
        allowed = int((COST - 1) * self._beside.at(0) / slope)
        if allowed > ROW_TOKENS:
            allowed -= allowed % ROW_TOKENS
        return min(max(allowed, MIN_TOKENS), self._max_tokens)

    def _without_replies(self) -> int:
        slope = self._alone.slope
        if slope is None:
            return self._max_tokens
        allowed = int((MAX_STEP_S - self._alone.at(0)) / slope)
        return min(max(allowed // PANEL_TOKENS, 1) * PANEL_TOKENS, self._max_tokens)
