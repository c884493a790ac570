"""The version of this package, where every folder may read it."""

VERSION = "0.1.0"
