"""Parts of models that look at images."""

from orchard.nn.vision.patches import Patches

__all__ = ["Patches"]
