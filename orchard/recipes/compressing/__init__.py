"""The parts of `orchard compress`: plans and their steps, what they will cost, text to learn from, training, measuring, going on.

`orchard.recipes.compress` puts them together.
"""
