"""Tools that a model may call: Python functions with types, or classes in the manner of Apple's SDK.

A tool box describes them to a model (`specs`) and runs them (`call`). What a model writes as arguments is checked before a tool
sees it, and what a tool does wrong never goes past the box: it becomes a text for the model and an error for the caller.
"""

from __future__ import annotations

from orchard.session.tools.box import ToolBox, ToolResult
from orchard.session.tools.entry import Entry, tool_of
from orchard.session.tools.errors import BadToolError
from orchard.session.tools.tool import Tool

__all__ = ["BadToolError", "Entry", "Tool", "ToolBox", "ToolResult", "tool_of"]
