"""Models that look at images."""

from orchard.models.vision.vit import ViT, small_vit

__all__ = ["ViT", "small_vit"]
