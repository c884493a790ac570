"""What is learnt from: files become rows, rows become tokens, tokens become batches, each step resumable to the bit.

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchard.data.batches import Batches
    from orchard.data.chat import conversation
    from orchard.data.encode import Encode
    from orchard.data.errors import BadSample, SampleTooLong, StateError, UnstableTemplate
    from orchard.data.jsonl import Jsonl
    from orchard.data.mix import Mix
    from orchard.data.order import Repeat, Shuffle
    from orchard.data.packing import Pack
    from orchard.data.parquet import Parquet
    from orchard.data.prefetch import Prefetch
    from orchard.data.scenes import Scenes
    from orchard.data.source import Pair, Row, Sample, Source
    from orchard.data.text import Text

_HOME = {
    "BadSample": "errors",
    "Batches": "batches",
    "Encode": "encode",
    "Jsonl": "jsonl",
    "Mix": "mix",
    "Pack": "packing",
    "Pair": "source",
    "Parquet": "parquet",
    "Prefetch": "prefetch",
    "Repeat": "order",
    "Row": "source",
    "Sample": "source",
    "SampleTooLong": "errors",
    "Scenes": "scenes",
    "Shuffle": "order",
    "Source": "source",
    "StateError": "errors",
    "Text": "text",
    "UnstableTemplate": "errors",
    "conversation": "chat",
}

__all__ = [
    "BadSample",
    "Batches",
    "Encode",
    "Jsonl",
    "Mix",
    "Pack",
    "Pair",
    "Parquet",
    "Prefetch",
    "Repeat",
    "Row",
    "Sample",
    "SampleTooLong",
    "Scenes",
    "Shuffle",
    "Source",
    "StateError",
    "Text",
    "UnstableTemplate",
    "conversation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
