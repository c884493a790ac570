"""Python types as schemas that an answer must match, and JSON back as objects of those types."""

from orchard.session.schema.content import GeneratedContent, GenerationID
from orchard.session.schema.dynamic import DynamicGenerationSchema
from orchard.session.schema.errors import (
    GenerableDecoratorError,
    SchemaError,
    UnreadableContentError,
    UnsupportedTypeError,
)
from orchard.session.schema.generable import (
    ConvertibleFromGeneratedContent,
    ConvertibleToGeneratedContent,
    Generable,
    generable,
)
from orchard.session.schema.guides import GenerationGuide, GuideType, guide
from orchard.session.schema.partial import Partial, PartialReader
from orchard.session.schema.schema import GenerationSchema, Property, schema_for

__all__ = [
    "ConvertibleFromGeneratedContent",
    "ConvertibleToGeneratedContent",
    "DynamicGenerationSchema",
    "Generable",
    "GenerableDecoratorError",
    "GeneratedContent",
    "GenerationGuide",
    "GenerationID",
    "GenerationSchema",
    "GuideType",
    "Partial",
    "PartialReader",
    "Property",
    "SchemaError",
    "UnreadableContentError",
    "UnsupportedTypeError",
    "generable",
    "guide",
    "schema_for",
]
