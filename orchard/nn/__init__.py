"""Modules that models are made of. Each is built from its own nested config."""
