"""Transforms: callables from one config tree to another, and what belongs to them."""
