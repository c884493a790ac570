"""Apple's Foundation Models SDK for Python, on any machine and with any model: change the import line and a program runs.

import orchard.fm as fm

session = fm.LanguageModelSession("You are a helpful assistant.")
answer = await session.respond("What is the capital of France?")

All names of the SDK are here, and `LanguageModel` for models of your own choice. The same without asyncio is `orchard.Session`.
Each name brings its module in when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODELS = "orchard.session.fm.models"
_TALK = "orchard.session.fm.conversation"
_PROMPT = "orchard.session.prompt"
_ERRORS = "orchard.session.errors"
_SCHEMA = "orchard.session.schema"
_OPTIONS = "orchard.session.options"

_SDK = {
    "SystemLanguageModel": _MODELS,
    "LanguageModelSession": _TALK,
    "Attachment": _PROMPT,
    "ImageAttachment": _PROMPT,
    "PromptComponent": _PROMPT,
    "Prompt": _PROMPT,
    "PromptError": _ERRORS,
    "ImagePromptError": _ERRORS,
    "Transcript": "orchard.session.transcript",
    "SystemLanguageModelUseCase": _MODELS,
    "SystemLanguageModelGuardrails": _MODELS,
    "SystemLanguageModelUnavailableReason": _MODELS,
    "Tool": "orchard.session.tools",
    "FoundationModelsError": _ERRORS,
    "GenerationError": _ERRORS,
    "ExceededContextWindowSizeError": _ERRORS,
    "AssetsUnavailableError": _ERRORS,
    "GuardrailViolationError": _ERRORS,
    "UnsupportedGuideError": _ERRORS,
    "UnsupportedLanguageOrLocaleError": _ERRORS,
    "InvalidGenerationSchemaError": _ERRORS,
    "DecodingFailureError": _ERRORS,
    "RateLimitedError": _ERRORS,
    "ConcurrentRequestsError": _ERRORS,
    "RefusalError": _ERRORS,
    "ToolCallError": _ERRORS,
    "GenerationErrorCode": _ERRORS,
    "generable": _SCHEMA,
    "guide": _SCHEMA,
    "GenerationSchema": _SCHEMA,
    "GeneratedContent": _SCHEMA,
    "GenerationGuide": _SCHEMA,
    "GuideType": _SCHEMA,
    "GenerationOptions": _OPTIONS,
    "SamplingMode": _OPTIONS,
    "SamplingModeType": _OPTIONS,
    "GenerationID": _SCHEMA,
    "ConvertibleFromGeneratedContent": _SCHEMA,
    "ConvertibleToGeneratedContent": _SCHEMA,
    "Generable": _SCHEMA,
}
_MORE = {
    "LanguageModel": _MODELS,
    "ContextOptions": _OPTIONS,
    "ToolCallingMode": _OPTIONS,
    "ReasoningLevel": _OPTIONS,
    "DynamicGenerationSchema": _SCHEMA,
    "Guardrails": "orchard.session.guardrails",
    "Hooks": "orchard.session.hooks",
    "Profile": "orchard.session.profiles",
    "Response": "orchard.session.streams",
    "Snapshot": "orchard.session.streams",
    "Usage": "orchard.session.turn",
    "TimedOutError": _ERRORS,
    "TranscriptError": _ERRORS,
    "UnsupportedCapabilityError": _ERRORS,
}
_HOMES = _SDK | _MORE
__all__ = [
    "AssetsUnavailableError",
    "Attachment",
    "ConcurrentRequestsError",
    "ContextOptions",
    "ConvertibleFromGeneratedContent",
    "ConvertibleToGeneratedContent",
    "DecodingFailureError",
    "DynamicGenerationSchema",
    "ExceededContextWindowSizeError",
    "FoundationModelsError",
    "Generable",
    "GeneratedContent",
    "GenerationError",
    "GenerationErrorCode",
    "GenerationGuide",
    "GenerationID",
    "GenerationOptions",
    "GenerationSchema",
    "GuardrailViolationError",
    "Guardrails",
    "GuideType",
    "Hooks",
    "ImageAttachment",
    "ImagePromptError",
    "InvalidGenerationSchemaError",
    "LanguageModel",
    "LanguageModelSession",
    "Profile",
    "Prompt",
    "PromptComponent",
    "PromptError",
    "RateLimitedError",
    "ReasoningLevel",
    "RefusalError",
    "Response",
    "SamplingMode",
    "SamplingModeType",
    "Snapshot",
    "SystemLanguageModel",
    "SystemLanguageModelGuardrails",
    "SystemLanguageModelUnavailableReason",
    "SystemLanguageModelUseCase",
    "TimedOutError",
    "Tool",
    "ToolCallError",
    "ToolCallingMode",
    "Transcript",
    "TranscriptError",
    "UnsupportedCapabilityError",
    "UnsupportedGuideError",
    "UnsupportedLanguageOrLocaleError",
    "Usage",
    "generable",
    "guide",
]

if TYPE_CHECKING:
    from orchard.session.errors import (
        AssetsUnavailableError,
        ConcurrentRequestsError,
        DecodingFailureError,
        ExceededContextWindowSizeError,
        FoundationModelsError,
        GenerationError,
        GenerationErrorCode,
        GuardrailViolationError,
        ImagePromptError,
        InvalidGenerationSchemaError,
        PromptError,
        RateLimitedError,
        RefusalError,
        TimedOutError,
        ToolCallError,
        TranscriptError,
        UnsupportedCapabilityError,
        UnsupportedGuideError,
        UnsupportedLanguageOrLocaleError,
    )
    from orchard.session.fm.conversation import LanguageModelSession
    from orchard.session.fm.models import (
        LanguageModel,
        SystemLanguageModel,
        SystemLanguageModelGuardrails,
        SystemLanguageModelUnavailableReason,
        SystemLanguageModelUseCase,
    )
    from orchard.session.guardrails import Guardrails
    from orchard.session.hooks import Hooks
    from orchard.session.options import (
        ContextOptions,
        GenerationOptions,
        ReasoningLevel,
        SamplingMode,
        SamplingModeType,
        ToolCallingMode,
    )
    from orchard.session.profiles import Profile
    from orchard.session.prompt import Attachment, ImageAttachment, Prompt, PromptComponent
    from orchard.session.schema import (
        ConvertibleFromGeneratedContent,
        ConvertibleToGeneratedContent,
        DynamicGenerationSchema,
        Generable,
        GeneratedContent,
        GenerationGuide,
        GenerationID,
        GenerationSchema,
        GuideType,
        generable,
        guide,
    )
    from orchard.session.streams import Response, Snapshot
    from orchard.session.tools import Tool
    from orchard.session.transcript import Transcript
    from orchard.session.turn import Usage


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orchard.fm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
