"""The embedding (and a head of its own) in fewer bits: what rows of tokens are looked up in, and scored with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchard.core.config import BaseConfig
from orchard.nn.formats import Plain
from orchard.transforms.ptq import fitted_all
from orchard.transforms.rtn import Rtn

ENDS = ("embedding", "head")


@dataclass(frozen=True)
class Ends(Rtn):
    """Round-to-nearest for both ends of a model. Ends that are packed already stay as they are."""

    def chosen(self, tree: Any) -> tuple[dict[str, BaseConfig], list[str]]:
        tree = tree.complete()
        there = [path for path in ENDS if getattr(tree, path, None) is not None]
        return fitted_all(
            tree, {path: self.usual() for path in there if isinstance(tree.get(path).format, Plain.Config)}
        )
