"""GGUF files in and out: a bounds-checked reader, a writer, and the block formats that tensors are stored in."""

from __future__ import annotations

from orchard.weights.gguf.quants import dequantize, quantize
from orchard.weights.gguf.reader import GGUFFile, TensorInfo
from orchard.weights.gguf.types import ArrayType, GGMLType, GGUFValueType, Typed
from orchard.weights.gguf.writer import TensorOut, write_gguf

__all__ = [
    "ArrayType",
    "GGMLType",
    "GGUFFile",
    "GGUFValueType",
    "TensorInfo",
    "TensorOut",
    "Typed",
    "dequantize",
    "quantize",
    "write_gguf",
]
