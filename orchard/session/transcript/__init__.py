"""What was said in a conversation: typed entries, a mutable sequence of them, and the file format of Apple's framework."""

from orchard.session.transcript.entries import (
    Entry,
    Instructions,
    PromptEntry,
    Reasoning,
    Response,
    ResponseFormat,
    Segment,
    StructureSegment,
    TextSegment,
    ToolCall,
    ToolCalls,
    ToolDefinition,
    ToolOutput,
    new_id,
)
from orchard.session.transcript.history import Transcript

Prompt = PromptEntry

__all__ = [
    "Entry",
    "Instructions",
    "Prompt",
    "PromptEntry",
    "Reasoning",
    "Response",
    "ResponseFormat",
    "Segment",
    "StructureSegment",
    "TextSegment",
    "ToolCall",
    "ToolCalls",
    "ToolDefinition",
    "ToolOutput",
    "Transcript",
    "new_id",
]
