"""Evaluations: what a model can do, and how much of it is left after something was done to it."""
