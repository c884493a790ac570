"""Neurons that live elsewhere: the rows of those in use, without gaps, and who stays among them."""

from orchard.cache.neurons.buffer import NeuronBuffer
from orchard.cache.neurons.window import NeuronWindow, Plan, Tally

__all__ = ["NeuronBuffer", "NeuronWindow", "Plan", "Tally"]
