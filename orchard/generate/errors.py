"""The errors that only generation can meet."""

from __future__ import annotations

from orchard.core.errors import OrchardError, UsageError


class NumericError(OrchardError):
    """Scores from which no token can be chosen: NaN, infinite, or all ruled out."""

    code = "numeric"


class GrammarStuck(NumericError):
    """An answer that its grammar cannot follow: a token that it does not allow, or a limit that it ran into."""

    code = "grammar-stuck"


class BadGrammar(UsageError):
    """A regular expression or a grammar that cannot be read, is too large, or that no text can match."""

    code = "bad-grammar"


class UnsupportedSchema(UsageError):
    """A JSON Schema that cannot be held to: `keyword` says which part of it, `pointer` where (a JSON pointer)."""

    code = "unsupported-schema"

    def __init__(self, keyword: str, pointer: str, why: str, *, hint: str = "") -> None:
        place = f"at {pointer}" if pointer else "at the top of the schema"
        super().__init__(
            f"`{keyword}` {place}: {why}", hint=hint or "say it in another way, or leave it out and check the answer"
        )
        self.keyword = keyword
        self.pointer = pointer


class DraftMismatch(UsageError):
    """A draft model whose token ids mean something else than the model's."""

    code = "draft-mismatch"

    def __init__(self, why: str, *, hint: str = "") -> None:
        super().__init__(why, hint=hint or "use a draft model that was trained with the same tokenizer")
