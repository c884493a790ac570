"""What can go wrong while a model learns."""

from __future__ import annotations

from orchard.core.errors import OrchardError


class Diverged(OrchardError):
    """The loss or a gradient is not a number any more. The weights are those of the last sound step."""

    code = "diverged"


class NothingToLearn(OrchardError):
    """A source gave no batch, or none with a target."""

    code = "nothing-to-learn"
