"""What goes wrong with a guard itself, apart from what it finds: so that neither is mistaken for the other."""

from __future__ import annotations

from orchard.session.errors import FoundationModelsError, GenerationError


class GuardUnavailable(GenerationError):
    """The safety check could not be made, so nothing was let through."""

    code = "guard-unavailable"
    retryable = True


class PolicyConfigError(FoundationModelsError):
    """A safety policy that makes no sense: an unknown mode, category, action or threshold."""

    code = "guard-policy"
    exit_code = 2
