"""What a compressed model is that files of others have no words for: said by name before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchard.core.errors import UnsupportedFormat, UsageError

if TYPE_CHECKING:
    from orchard.models.language.decoder import Decoder


def refuse_unsayable(tree: Decoder.Config, target: str, *, merge: bool, unmerge: bool = False) -> int:
    """How many side paths the model has of its own, to be merged. Shared stores are refused; side paths too, unless they are
    to be merged. Whatever else differs from the family is named by the writer."""
    from orchard.transforms.lora import LoraLinear

    owners = [getattr(getattr(block.mixer, "store", None), "owner", None) for block in tree.stack.layers]
    shared = [layer for layer, owner in enumerate(owners) if owner is not None]
    if shared:
        first, owner = shared[0], owners[shared[0]]
        raise UnsupportedFormat(
            f"{target} cannot say that {len(shared)} layers, from {first} on, read the keys and values of layer {owner}",
            hint="keep it as a compressed file: --format orchard",
        )
    sides = tree.find(LoraLinear)
    if sides and (unmerge or not merge):
        raise UsageError(
            f"the model has {len(sides)} side paths of its own ({sides[0][0]} …), for which {target} has no words",
            hint="add them to the weights with --merge, or keep a compressed file: --format orchard",
        )
    return len(sides)
