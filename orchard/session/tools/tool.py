"""`Tool`: the class to derive from, as in Apple's Foundation Models SDK, with typed arguments besides.

    class Weather(Tool):
        name = "get_weather"
        description = "The weather in a city"

        @dataclass
        class Arguments:
            city: str

        def call(self, arguments: Arguments) -> str:
            return f"Sunny in {arguments.city}"

As in the SDK, a tool may give `arguments_schema` instead of `Arguments`; its `call` is then a coroutine that is handed a
`GeneratedContent`. What `call` answers may be anything that JSON can hold.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from orchard.session.tools.errors import BadToolError, UnnamedToolError

if TYPE_CHECKING:
    from orchard.session.schema import GenerationSchema


class Tool(ABC):
    """Checked when an instance is made. A class with an `__init__` of its own calls `super().__init__()`."""

    name: str
    description: str
    includes_schema_in_instructions: ClassVar[bool] = True
    """Whether the model is shown the arguments' types; they are held to them either way."""

    @property
    @abstractmethod
    def arguments_schema(self) -> GenerationSchema:
        """What the arguments look like. Read once."""

    @abstractmethod
    def call(self, args: Any) -> Any:
        """What the tool does. The arguments are a `GeneratedContent`, or an instance of `Arguments`."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        typed = "Arguments" in cls.__dict__ and "arguments_schema" not in cls.__dict__
        if typed:
            cls.arguments_schema = property(_schema_of_arguments)  # type: ignore[assignment, method-assign]

    def __init__(self) -> None:
        self._arguments_schema = checked(self)


def checked(tool: Any) -> GenerationSchema:
    """The schema of a tool's arguments. Raises what is wrong with the tool: a mistake is found before a model calls it."""
    kind = type(tool).__name__
    for field in ("name", "description"):
        if not hasattr(tool, field):
            raise UnnamedToolError(
                f"the tool {kind} has no {field}", hint=f'give the class a line such as {field} = "…"'
            )
        if not isinstance(getattr(tool, field), str):
            raise BadToolError(f"the {field} of the tool {kind} is no text", hint=f'write {field} = "…"')
    from orchard.session.schema import GenerationSchema

    schema = tool.arguments_schema if hasattr(type(tool), "arguments_schema") else _schema_of_arguments(tool)
    if not isinstance(schema, GenerationSchema):
        hint = "give `arguments_schema` a GenerationSchema, such as Params.generation_schema()"
        raise BadToolError(f"the arguments_schema of the tool {kind} is no GenerationSchema", hint=hint)
    if not callable(getattr(tool, "call", None)):
        raise BadToolError(f"the tool {kind} has no method `call`", hint="write async def call(self, args)")
    if not typed_arguments(tool) and not inspect.iscoroutinefunction(tool.call):
        hint = "write async def call(self, args); a tool with a class `Arguments` may have a plain one"
        raise BadToolError(f"`call` of the tool {kind} is not async", hint=hint)
    return schema


def typed_arguments(tool: Any) -> bool:
    """Whether `call` is handed an instance of the tool's own `Arguments`."""
    found = inspect.getattr_static(type(tool), "arguments_schema", None)
    return found is None or (isinstance(found, property) and found.fget is _schema_of_arguments)


def schema_once(tool: Any) -> GenerationSchema:
    """The schema that was read when the tool was made; a tool that never called `Tool.__init__` is checked here instead."""
    known = getattr(tool, "_arguments_schema", None)
    return checked(tool) if known is None else known


def _schema_of_arguments(tool: Any) -> GenerationSchema:
    from orchard.session.schema import schema_for

    if not hasattr(tool, "Arguments"):
        hint = "give the class `Arguments` (a dataclass) or the property `arguments_schema`"
        raise BadToolError(f"the tool {type(tool).__name__} does not say what its arguments are", hint=hint)
    return schema_for(tool.Arguments)
