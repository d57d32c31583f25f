"""Strict products are asked for before torch does any work."""

from batchinfer_kernels.determinism import prepare

prepare()
