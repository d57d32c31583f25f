"""Kernels run in Triton's interpreter here, which must be known before one of them is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
