"""For all tests: the process is prepared as an engine's process is, before torch is loaded."""

from batchinfer_kernels.determinism import prepare

prepare()
