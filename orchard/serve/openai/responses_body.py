"""The body of `POST /v1/responses`, field by field as OpenAI has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from orchard.serve.bodies import one_of
from orchard.serve.openai.fields import MOST_TOKENS, Exact

MOST_LOGPROBS = 20


def _is_list(value: Any) -> str:
    """A text or parts: told apart by what was sent, so that what is wrong with a part is said of the part."""
    return "list[…]" if isinstance(value, list) else "str"


def _is_object(value: Any) -> str:
    return "Choice" if isinstance(value, dict) else "str"


class ResponsesPart(Exact):
    """A part of a message or of a tool's result. `annotations` and `logprobs` come back with answers."""

    type: Annotated[str, one_of("input_text", "output_text", "refusal")]
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    image_url: Any = None
    """input_image, and so on: refused by name"""
    file_id: Any = None
    detail: Any = None
    prompt_cache_breakpoint: Any = None
    """Everything that is read is kept for the next request; there is nothing to ask for."""


Texts = Annotated[Annotated[str, Tag("str")] | Annotated[list[ResponsesPart], Tag("list[…]")], Discriminator(_is_list)]


class ResponsesItem(Exact):
    """A message, a call, a call's result, or thoughts. `type` says which of the others it has."""

    type: str | None = None
    role: str | None = None
    content: Texts | None = None
    call_id: str | None = None
    """function_call and function_call_output"""
    name: str | None = None
    arguments: str | None = None
    output: Texts | None = None
    # What comes back with the items of an answer, and means nothing to a model.
    id: str | None = None
    status: str | None = None
    summary: Any = None
    encrypted_content: Any = None
    phase: Any = None
    caller: Any = None
    namespace: Any = None
    parsed_arguments: Any = None


class ResponsesTool(Exact):
    type: Annotated[str, one_of("function")]
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments are always held to their schema."""


class ResponsesToolName(Exact):
    type: Annotated[str, one_of("function")]
    name: str = ""


class ResponsesToolChoice(Exact):
    type: Annotated[str, one_of("function", "allowed_tools")]
    name: str | None = None
    mode: str | None = None
    """allowed_tools, with `tools`"""
    tools: list[ResponsesToolName] | None = None


Choice = Annotated[
    Annotated[str, Tag("str")] | Annotated[ResponsesToolChoice, Tag("Choice")], Discriminator(_is_object)
]


class ResponsesFormat(Exact):
    type: Annotated[str, one_of("text", "json_object", "json_schema")]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Answers are always held to the schema."""


class ResponsesText(Exact):
    format: ResponsesFormat | None = None
    verbosity: str | None = None


class ResponsesReasoning(Exact):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponsesStreamOptions(Exact):
    include_obfuscation: bool | None = None
    """Nothing is ever padded here."""


class ResponsesBody(Exact):
    """`POST /v1/responses`. The server keeps nothing: `input` is the whole conversation."""

    model: str | None = Field(None, max_length=512)
    input: Annotated[
        Annotated[str, Tag("str")] | Annotated[list[ResponsesItem], Tag("list[…]")], Discriminator(_is_list)
    ]
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    include: list[str] | None = None
    reasoning: ResponsesReasoning | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: int | None = None
    # Of no consequence: prefixes are always kept, and there is one class of service.
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    # Had no effect, and is named.
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Refused.
    previous_response_id: Any = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
