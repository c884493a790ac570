"""What can go wrong with weights that live elsewhere."""

from __future__ import annotations

from orchard.core.errors import BadFile, ConfigError, OrchardError


class BudgetTooSmall(ConfigError):
    """The resident budget does not hold what one layer needs at once."""

    code = "budget-too-small"

    def __init__(self, *, budget: int, needed: int, what: str) -> None:
        super().__init__(
            f"a resident budget of {budget:,} bytes does not hold {what}, which take {needed:,}",
            hint=f"give at least {needed:,} bytes",
        )
        self.budget = budget
        self.needed = needed


class RecordsUnreadable(OrchardError):
    """A record could not be read: the disk went away or the file was cut. What is resident still works."""

    code = "records-unreadable"
    retryable = True


class OtherModel(BadFile):
    """A file of records or a trace belongs to another model."""

    code = "other-model"
