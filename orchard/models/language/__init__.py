"""Language models."""

from orchard.models.language.decoder import Decoder

__all__ = ["Decoder"]
