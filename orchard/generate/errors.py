"""The one error that only generation can meet."""

from __future__ import annotations

from orchard.core.errors import OrchardError


class NumericError(OrchardError):
    """Scores from which no token can be chosen: NaN, infinite, or all ruled out."""

    code = "numeric"
