"""Whole models, and the families that checkpoints come from."""
