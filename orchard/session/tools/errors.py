"""Errors of tools. Each is also what Apple's SDK raises in its place, so that either `except` catches it."""

from __future__ import annotations

from orchard.core.errors import UsageError


class BadToolError(UsageError, TypeError):
    """Something that cannot be a tool: no types, a wrong signature, a name that is taken."""

    code = "bad-tool"


class UnnamedToolError(BadToolError, AssertionError):
    """A tool without a name or a description."""


class UnknownToolError(UsageError):
    """A call of a tool that is not there."""

    code = "unknown-tool"
