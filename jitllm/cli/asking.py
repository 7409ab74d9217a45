"""What is asked of a model: the settings of a command line, and prompts as token ids.

Knows the Engine port, tokenizers and chat templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jitllm.engine import Request, Sampling
from jitllm.errors import JitllmError, UsageError

if TYPE_CHECKING:
    from jitllm.compose import Loaded

Turn = dict[str, str]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says about replies."""

    max_tokens: int | None
    system: str
    stops: tuple[str, ...]
    ignore_eos: bool
    sampling: Sampling

    def request(self, loaded: Loaded, prompt_ids: list[int]) -> Request:
        """The request that continues `prompt_ids`."""
        stop_ids = frozenset() if self.ignore_eos else frozenset(loaded.header.stop_ids)
        return Request(tuple(prompt_ids), self.max_tokens, self.sampling, stop_ids)

    def turns(self) -> list[Turn]:
        """How a conversation begins."""
        return [{"role": "system", "content": self.system}] if self.system else []


def user(text: str) -> Turn:
    """What the user says."""
    return {"role": "user", "content": text}


def text_ids(loaded: Loaded, text: str) -> list[int]:
    """Tokens of a text that is continued as it stands. Raises UsageError if there are none."""
    ids = loaded.tokenizer.encode(text)
    if not ids:
        raise UsageError("the text is empty", "write it after the model, or use -f FILE")
    return ids


def chat_ids(loaded: Loaded, turns: list[Turn]) -> list[int]:
    """Tokens of a conversation that the model is to go on with.

    Raises JitllmError for a base model.
    """
    if loaded.chat is None:
        raise JitllmError(
            "this model has no chat template",
            "give it a text to continue, or convert its source again with -chat-template FILE",
        )
    return loaded.tokenizer.encode_rendered(loaded.chat.render(turns))
