"""Models as the SDK names them: `SystemLanguageModel` is the default model, `LanguageModel` any other."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.session.assets import DEFAULT_MODEL, ModelRef, models_forbidden, tokens_of
from orchard.session.turn import Capability, Executor

if TYPE_CHECKING:
    from orchard.session.model import Model


class SystemLanguageModelUseCase(IntEnum):
    """What a model is wanted for."""

    GENERAL = 0
    CONTENT_TAGGING = 1


class SystemLanguageModelGuardrails(IntEnum):
    """How strict the guardrails are."""

    DEFAULT = 0
    PERMISSIVE_CONTENT_TRANSFORMATIONS = 1


class SystemLanguageModelUnavailableReason(IntEnum):
    """Why a model cannot be used. Here: models are switched off (`ORCHARD_FORBID_MODELS`), or this one was not pulled."""

    APPLE_INTELLIGENCE_NOT_ENABLED = 0
    DEVICE_NOT_ELIGIBLE = 1
    MODEL_NOT_READY = 2
    UNKNOWN = 0xFF


_GUARDRAILS = {
    SystemLanguageModelGuardrails.DEFAULT: "default",
    SystemLanguageModelGuardrails.PERMISSIVE_CONTENT_TRANSFORMATIONS: "permissive",
}


class LanguageModel:
    """Any model: the name of one that was pulled, a path, an `orchard.Model`, or an executor. Loaded when first needed."""

    def __init__(
        self,
        model: str | Path | Model | Executor = DEFAULT_MODEL,
        *,
        use_case: Any = SystemLanguageModelUseCase.GENERAL,
        guardrails: Any = SystemLanguageModelGuardrails.DEFAULT,
        adapters: Sequence[str] = (),
    ) -> None:
        """`guardrails`: as in the SDK, or a mode or a `Guardrails` of Orchard. `adapters`: names of loaded adapters."""
        self.ref = model if isinstance(model, ModelRef) else ModelRef(model)
        self.use_case = _use_case(use_case)
        self.guardrails = guardrails if not hasattr(guardrails, "value") else _guardrails(guardrails.value)
        self.adapters = (adapters,) if isinstance(adapters, str) else tuple(adapters)

    @property
    def name(self) -> str:
        return self.ref.name

    def is_available(self) -> tuple[bool, SystemLanguageModelUnavailableReason | None]:
        """Whether the model can be used now, and why not. Nothing is loaded to find out."""
        if not self.ref.why_not():
            return True, None
        if models_forbidden():
            return False, SystemLanguageModelUnavailableReason.APPLE_INTELLIGENCE_NOT_ENABLED
        return False, SystemLanguageModelUnavailableReason.MODEL_NOT_READY

    @property
    def context_size(self) -> int:
        """Tokens that fit: instructions, tools, conversation and answer together."""
        return self.ref.executor().context_size

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.ref.executor().capabilities

    async def token_count(self, value: Any = None, *, instructions: str | None = None) -> int:
        """Tokens of a prompt, a `GenerationSchema`, a `Transcript`, a list of tools, or of instructions: one of them."""
        return await asyncio.to_thread(lambda: tokens_of(self.ref.executor(), value, instructions))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class SystemLanguageModel(LanguageModel):
    """The default model of this machine."""

    def __init__(
        self,
        use_case: SystemLanguageModelUseCase = SystemLanguageModelUseCase.GENERAL,
        guardrails: SystemLanguageModelGuardrails = SystemLanguageModelGuardrails.DEFAULT,
    ) -> None:
        super().__init__(DEFAULT_MODEL, use_case=use_case, guardrails=guardrails)


def model_of(given: Any) -> LanguageModel:
    """A model as a session takes it."""
    if given is None:
        return SystemLanguageModel()
    return given if isinstance(given, LanguageModel) else LanguageModel(given)


def _use_case(given: Any) -> str:
    value = getattr(given, "value", given)
    if value in ("general", "content_tagging"):
        return str(value)
    try:
        return SystemLanguageModelUseCase(value).name.lower()
    except ValueError:
        warnings.warn(f"no use case {given!r}: the general one is used", stacklevel=3)
        return "general"


def _guardrails(value: Any) -> str:
    try:
        return _GUARDRAILS[SystemLanguageModelGuardrails(value)]
    except ValueError:
        warnings.warn(f"no guardrails {value!r}: the default ones are used", stacklevel=4)
        return "default"
