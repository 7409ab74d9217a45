"""How many tokens of prompts a step takes beside replies under way, so that those do not falter.

Of five steps, two may take COST times what the other three do, which have no prompts: few large
bites cost less than many small ones, most gaps between tokens stay as they are, and what a step
takes without prompts is always known. What tokens cost is not modelled, because it is no line
(kernels compute rows in groups, disks are read in the meantime): the number of tokens is raised a
little after a step that was fast enough and lowered a little after one that was not, which finds
the number whose median step is just fast enough, however noisy the machine.

All that is for replies that a newcomer slows down. Where several wait for their first token, and
there are at most twice as many replies as they, or one step is enough for all of them, prompts go
ahead: replies take part in steps that are as long as if there were none. Throttled, they would keep
the many from starting for the sake of the few, and compute the few alone, at the price of all.
Knows counts and seconds. Reads no clock.
"""

from __future__ import annotations

from collections import deque
from statistics import median

COST = 2.2
"""What a step with prompts may take, as a multiple of one without: far from the fourfold that no
gap should reach, because a machine stalls for a moment now and then."""

MAX_STEP_S = 0.1
"""What a step may take while prompts go ahead, or nobody is in the middle of a reply, and someone
waits for the next."""

FIRST_TOKENS = 8
"""Prompt tokens beside replies before anything is known."""

FIRST_ALONE_TOKENS = 128
"""Prompt tokens without replies, while someone waits, before anything is known."""

MAX_REST = 0.25
"""What a step may have beyond its tokens, as a share of them, where that is all of the prompts: a
step for the rest alone would read all weights for little."""

REPLIES_PER_NEWCOMER = 2
"""Replies that two or more newcomers go ahead of, for each of them."""

MIN_TOKENS = 4
"""Fewest prompt tokens beside replies: a prompt always moves on."""

ROW_TOKENS = 8
"""Kernels compute so many rows for little more than one."""

PANEL_TOKENS = 64
"""Fewest rows of a step whose prompts go ahead, and what more are a multiple of."""

_STEP = 1.15  # up or down
_NUM_PLAIN = 5  # steps without prompts that count


class Pace:
    """What a scheduler learnt about the steps of its device.

    max_tokens: the most prompt tokens of any step.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._plain_s: deque[float] = deque(maxlen=_NUM_PLAIN)
        self._num_bites = 0
        self._owed = 0  # steps without prompts, to those in the middle of a reply
        self._is_ahead = False  # whether the prompts of the last step went ahead of replies
        self._beside = min(float(FIRST_TOKENS), max_tokens)
        self._alone = min(float(FIRST_ALONE_TOKENS), max_tokens)

    def observe(self, num_replies: int, prompt_tokens: int, seconds: float) -> None:
        """A step with so many rows of replies and so many tokens of prompts took `seconds`."""
        if not prompt_tokens:
            self._plain_s.append(seconds)
            self._owed = max(self._owed - 1, 0)
        elif num_replies and not self._is_ahead:
            self._num_bites += 1
            self._owed = 1 + self._num_bites % 2
            self._observe_beside(num_replies, prompt_tokens, seconds)
        else:
            # Most of the time goes to the tokens of prompts: go straight there.
            factor, rows = min(max(MAX_STEP_S / seconds, 0.5), 2.0), num_replies + prompt_tokens
            if factor < 1 or rows >= self._rows_ahead():
                self._alone = min(max(rows * factor, 1.0), self._max_tokens)

    def _observe_beside(self, num_replies: int, prompt_tokens: int, seconds: float) -> None:
        if not self._plain_s:
            return
        is_slow = seconds > COST * median(self._plain_s)
        if is_slow:
            self._beside = max(self._beside / _STEP, MIN_TOKENS)
        elif prompt_tokens >= self._beside_replies(num_replies):
            self._beside = min(self._beside * _STEP, self._max_tokens)

    @property
    def step_s(self) -> float:
        """What a step without prompts takes; 0 before there was one."""
        return median(self._plain_s) if self._plain_s else 0.0

    @property
    def is_quick(self) -> bool:
        """Whether a step without prompts takes no time that someone new would mind."""
        return bool(self._plain_s) and median(self._plain_s) <= MAX_STEP_S

    def prompt_tokens(self, num_replies: int, num_newcomers: int, pending_tokens: int) -> int:
        """Most prompt tokens of the next step.

        num_replies: rows that are in the middle of a reply. num_newcomers: who waits for a first
        token, and has a row or could; pending_tokens: what is left of their prompts.
        """
        together = self._rows_ahead()
        most = min(int(together * (1 + MAX_REST)), self._max_tokens)
        is_enough = pending_tokens <= most
        self._is_ahead = num_newcomers > 1 and (
            num_replies <= REPLIES_PER_NEWCOMER * num_newcomers or is_enough
        )
        if num_replies and not self._is_ahead:
            if not self._plain_s or self._owed:
                return 0
            return self._beside_replies(num_replies)
        if num_newcomers <= 1 or is_enough:
            return self._max_tokens
        rows = together
        if pending_tokens + num_replies <= min(together * (2 + MAX_REST), 2 * most):
            # Of the last two steps the first has the larger half: more first tokens are early.
            half = num_replies - -pending_tokens // 2
            rows = min(-(-half // PANEL_TOKENS) * PANEL_TOKENS, most)
        return min(max(rows - num_replies, MIN_TOKENS), self._max_tokens)

    def _beside_replies(self, num_replies: int) -> int:
        rows = int(self._beside) + num_replies
        tokens = rows - rows % ROW_TOKENS - num_replies
        return min(max(tokens, MIN_TOKENS), self._max_tokens)

    def _rows_ahead(self) -> int:
        """Rows of a step whose prompts go ahead: whole panels."""
        panels = max(int(self._alone) // PANEL_TOKENS, 1)
        return min(panels * PANEL_TOKENS, self._max_tokens)
