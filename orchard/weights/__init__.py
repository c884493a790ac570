"""Bytes in, bytes out: weights files read with every size checked first, and written whole or not at all."""
