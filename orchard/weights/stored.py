"""A model kept in memory the way its file keeps it, so that nothing is rounded twice and nothing grows.

Types that a weight format can hold code for code get that format. Other packed types become eight bits by groups of 32, whose
steps are finer than theirs. What the file holds in floating point stays so.
"""

from __future__ import annotations

from orchard.core.config import BaseConfig
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Int4, Int8, Plain
from orchard.nn.linear import Embedding, GroupedLinear, Linear
from orchard.weights.checkpoint import Checkpoint
from orchard.weights.gguf.grouped import GROUP
from orchard.weights.gguf.types import GGMLType

_KINDS = (Linear.Config, GroupedLinear.Config, Embedding.Config)


def as_stored(checkpoint: Checkpoint, tree: Decoder.Config) -> Decoder.Config:
    """`tree` with the format of every weight set to what the checkpoint stores its tensor as. Nothing is read."""
    tree = tree.clone()
    if checkpoint.format == "orchard":  # which says so itself; parts that it lacks stay as they are asked for
        kept = {path: node.format for path, node in checkpoint.config().walk() if isinstance(node, _KINDS)}
        for path, node in tree.walk():
            if isinstance(node, _KINDS) and path in kept:
                node.format = kept[path].clone()
        return tree
    for path, node in tree.walk():
        if isinstance(node, _KINDS):
            node.format = _format(_stored_type(checkpoint, path, tree))
    return tree


def as_dense(tree: Decoder.Config) -> Decoder.Config:
    """`tree` with every weight kept plain: for whoever changes weights, or merges something into them."""
    tree = tree.clone()
    for _, node in tree.walk():
        if isinstance(node, _KINDS):
            node.format = Plain.Config()
    return tree


def _stored_type(checkpoint: Checkpoint, path: str, tree: Decoder.Config) -> GGMLType | None:
    """What a GGUF file stores a part's weight as. None in folders, which have no packed types, and for a tensor that is
    missing: reading the weights refuses that."""
    if checkpoint.format != "gguf":
        return None
    ours = path.replace("[", ".").replace("]", "") + ".weight"
    return getattr(checkpoint.tensors.get(checkpoint.name(ours, tree)), "type", None)


def _format(stored: GGMLType | None) -> BaseConfig:
    match stored:
        case GGMLType.Q4_0:
            return Int4.Config(group=GROUP)
        case GGMLType.Q4_1 | GGMLType.Q4_K:
            return Int4.Config(group=GROUP, minimum=True)
        case None | GGMLType.F32 | GGMLType.F16 | GGMLType.BF16 | GGMLType.F64:
            return Plain.Config()
        case _:
            return Int8.Config(group=GROUP, half=True)
