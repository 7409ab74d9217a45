"""What requests and replies look like: OpenAI's fields, and ours.

Knows names, types and limits. A field that would change the meaning of a reply and is not
supported is refused, and so is one that nobody knows.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jitllm.config import KvType
from jitllm.engine import MAX_TOP_LOGPROBS, ParkedIn, Priority, Sampling

MAX_CHOICES = 128
MAX_PROMPTS = 1024
"""Replies of one request: prompts times choices."""
_MAX_INT = 2**31 - 1
_MAX_SEED = 2**63

NAME = Annotated[str, Field(min_length=1, max_length=512)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]


class Body(BaseModel):
    """Nothing is converted and nothing is ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(Body):
    """The only format of a reply so far."""

    type: Literal["text"]


class GenerationRequest(Body):
    """What chat and completion requests share."""

    model: NAME
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=_MAX_INT)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    seed: Annotated[int, Field(ge=-_MAX_SEED, lt=_MAX_SEED)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=1024),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    jitllm_priority: Literal["normal", "high"] | None = None
    response_format: TextFormat | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: NAME | None = None

    @field_validator("response_format", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in (None, "text"):
            raise ValueError(f"{value['type']!r} is not supported yet: only text is")
        return value

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        return self

    @property
    def num_choices(self) -> int:
        """Replies to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def priority(self) -> Priority:
        """As the engine calls it."""
        return Priority(self.jitllm_priority or "normal")

    def sampling(self) -> Sampling:
        """The settings of the first choice; without a seed, one is drawn."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            temperature=temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repeat_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            repeat_last_n=-1 if self.repeat_last_n is None else self.repeat_last_n,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=secrets.randbits(53) if self.seed is None else self.seed,
            logit_bias=tuple((int(key), bias) for key, bias in (self.logit_bias or {}).items()),
        )


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = None
    refusal: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value in ("tool", "function"):
            raise ValueError(f"the role {value!r} needs tools, which are not supported yet")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise ValueError(f"parts of type {part['type']!r} are not supported yet")
        return value

    @model_validator(mode="after")
    def _something_said(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        content = self.content or ""
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=65536)]
    max_completion_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if isinstance(value, list) and value:
            raise ValueError("tools are not supported yet; leave them out")
        return value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _no_choice(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError("tools are not supported yet; leave it out")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens to generate; None: until the model ends, or the context does."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @field_validator("suffix", mode="before")
    @classmethod
    def _no_suffix(cls, value: Any) -> Any:
        if value:
            raise ValueError("text after the completion is not supported yet; leave it out")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.best_of not in (None, self.num_choices):
            raise ValueError("best_of other than n is not supported")
        if len(self.prompts) * self.num_choices > MAX_PROMPTS:
            raise ValueError(f"prompt: more than {MAX_PROMPTS} replies, prompts times n")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Each one a text or token ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (tuple(id for id in self.prompt if isinstance(id, int)),)
        return tuple(
            item if isinstance(item, str) else tuple(item)
            for item in self.prompt
            if not isinstance(item, int)
        )

    @property
    def limit(self) -> int | None:
        """Tokens to generate; OpenAI's default here is 16."""
        return 16 if self.max_tokens is None else self.max_tokens


class MoveRequest(Body):
    """What moves to a device. blocks: A:B without B, A-B with B, N, head, or several with commas;
    to: a device, or host."""

    blocks: Text
    to: NAME


class PlaceRequest(Body):
    """POST /jitllm/v1/models/{id}/placement: one of a budget, a move, and a map of all blocks.

    strict: all of `placement` or nothing; otherwise what cannot be is in `declines`.
    """

    maxmem: str | Annotated[int, Field(ge=0, lt=2**63)] | None = None
    move: MoveRequest | None = None
    placement: Annotated[str, Field(min_length=1, max_length=1 << 16)] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        num = sum(given is not None for given in (self.maxmem, self.move, self.placement))
        if not num:
            raise ValueError("maxmem is missing, and so are move and placement; give one of them")
        if num > 1:
            raise ValueError("maxmem does not go with move or placement; give one of them")
        if self.strict is not None and self.placement is None:
            raise ValueError("strict is about a placement; leave it out")
        return self


class ParkRequest(Body):
    """POST /jitllm/v1/sessions/{id}/park: where keys and values wait; on disk if nobody says."""

    to: ParkedIn | None = None


class LoadRequest(Body):
    """POST /jitllm/v1/models"""

    path: NAME
    id: NAME | None = None
    maxmem: str | Annotated[int, Field(ge=0, lt=2**63)] | None = None
    ctx: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = None
    kv_type: KvType | None = None


class DrainRequest(Body):
    """POST /jitllm/v1/models/{id}/drain"""

    draining: bool = True


# Replies: what the OpenAPI document shows.


class ErrorDetail(BaseModel):
    """What went wrong; `param` is the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every refusal."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Tokens of the prompt that were there already."""

    cached_tokens: int


class UsageReply(BaseModel):
    """Tokens of every prompt, once each, and of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class JitllmReply(BaseModel):
    """Where a reply was computed and what that took."""

    model_config = ConfigDict(extra="allow")

    queued_ms: float
    prefill_ms: float
    decode_ms: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    restored_tokens: int
    seeds: list[int]
    cancelled: bool


class Likely(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(Likely):
    """A token of the reply, and what was likeliest in its place."""

    top_logprobs: list[Likely]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat reply."""

    content: list[TokenLogprob]
    refusal: None


class ReplyMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One reply."""

    index: int
    message: ReplyMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None


class ChatReply(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    jitllm: JitllmReply


class Logprobs(BaseModel):
    """Log-probabilities of a completion, a list entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One reply."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: Logprobs | None
    token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    jitllm: JitllmReply


class ModelCard(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models"""

    object: Literal["list"]
    data: list[ModelCard]


REQUESTS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    Message,
    TextPart,
    StreamOptions,
    TextFormat,
    PlaceRequest,
    MoveRequest,
    LoadRequest,
)

FIELD_NAMES = frozenset(name for request in REQUESTS for name in request.model_fields)
"""What an error may name."""
