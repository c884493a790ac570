"""Kernels for CUDA in Triton, each beside a plain torch twin that runs anywhere.

Nothing here is imported until a model is put on a GPU.
"""
