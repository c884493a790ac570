"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, field by field as Anthropic has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, StrictInt, Tag

from orchard.serve.bodies import Body, one_of
from orchard.serve.openai.fields import MOST_TOKENS

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _is_list(value: Any) -> str:
    """A text or blocks: told apart by what was sent, so that what is wrong with a block is said of the block."""
    return "list[AnthropicBlock]" if isinstance(value, list) else "str"


Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[list["AnthropicBlock"], Tag("list[AnthropicBlock]")], Discriminator(_is_list)
]


class AnthropicBlock(Body):
    """A part of a message. `type` says which of the others it has; what does not belong to it is not looked at."""

    type: Annotated[str, one_of("text", "tool_use", "tool_result", "thinking", "redacted_thinking")]
    text: str | None = None
    """text"""
    id: str | None = None
    """tool_use, with `name` and `input`"""
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    """tool_result, with `content` and `is_error`"""
    content: Content | None = None
    is_error: StrictBool | None = None
    thinking: str | None = None
    """thinking, with `signature`; redacted_thinking has `data`: what comes back of thoughts is left out"""
    signature: str | None = None
    data: str | None = None
    source: Any = None
    """image and document: refused by name"""
    citations: Any = None
    """null in texts that come back; nothing here is cited"""
    parsed_output: Any = None
    """What Anthropic's package puts beside a text."""
    caller: Any = None
    toolset_name: str | None = None
    cache_control: Any = None
    """Everything that is read is kept for the next request; there is nothing to ask for."""


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(Body):
    """A tool that the client runs. What Anthropic's own servers run has another `type`, and is refused by name."""

    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: StrictBool | None = None
    """Arguments are always held to their schema."""
    cache_control: Any = None


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class AnthropicThinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: StrictInt | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicMetadata(Body):
    user_id: str | None = None


class AnthropicFormat(Body):
    type: Annotated[str, one_of("json_schema")]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class AnthropicOutput(Body):
    format: AnthropicFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Asked(Body):
    """What counting and answering have in common."""

    model: str
    messages: list[AnthropicMessage]
    system: Content | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutput | None = None
    output_format: AnthropicFormat | None = None
    """An older name for `output_config.format`."""
    cache_control: Any = None
    # Refused.
    thread: Any = None
    compaction: Any = None
    container: Any = None
    mcp_servers: list[Any] | None = None


class CountBody(Asked):
    """`POST /v1/messages/count_tokens`."""


class MessagesBody(Asked):
    """`POST /v1/messages`."""

    max_tokens: StrictInt = Field(ge=1, le=MOST_TOKENS)
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, ge=0, le=1)
    top_k: StrictInt | None = Field(None, ge=0)
    stop_sequences: list[str] | None = None
    stream: StrictBool | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
