"""Kernels run in Triton's interpreter here unless a GPU is asked for, which must be known before one is imported."""

from tests.kernels.triton import device  # noqa: F401
