"""Whether this process can use the Triton kernels, and which sizes of a model they take: told without torch and without
importing triton.

The one home of those sizes: kernels assert them, backends refuse by them when they are made, and who plans a run asks
before a model is loaded.
"""

from __future__ import annotations

import importlib.util
import os

NOT_INSTALLED = "the package triton is not installed (pip install triton)"
NO_GPU = (
    "its kernels are for NVIDIA GPUs (device cuda); on a CPU only Triton's interpreter runs them, for tests and very "
    "slowly, where TRITON_INTERPRET=1 is set before Python starts"
)

MOST_HEAD_DIM = 256
# Of int8 caches: a head's codes in a block are followed by float32 scales, whose addresses are multiples of 4.
INT8_HEAD_DIM_MULTIPLE = 4
# A block of latents, which is keys and values, is held whole in shared memory, and the queries' with it: these fill
# what a GPU of compute capability 8.6 or 8.9 has.
LEAST_LATENT, MOST_LATENT, MOST_ROTATED = 16, 512, 256
# Numbers of a row that is normed, or that has one scale: a program holds all of it.
MOST_WIDTH = 16_384


def obstacle(*, on_cpu: bool) -> str | None:
    """What keeps kernels from running on that kind of device, None where nothing is known to."""
    if importlib.util.find_spec("triton") is None:
        return NOT_INSTALLED
    if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        return NO_GPU
    return None


def unfit_heads(head_dim: int, *, int8_cache: bool) -> str | None:
    """Why there is no attention of such heads, None where there is; a rule for each kind of KV cache."""
    if head_dim > MOST_HEAD_DIM:
        return f"heads have {head_dim} dimensions, and at most {MOST_HEAD_DIM} can be"
    if int8_cache and head_dim % INT8_HEAD_DIM_MULTIPLE:
        return (
            f"heads have {head_dim} dimensions, and with a KV cache in int8 only multiples of "
            f"{INT8_HEAD_DIM_MULTIPLE} can be"
        )
    return None


def unfit_latents(rank: int, rotated: int) -> str | None:
    """Why there is no attention to latents of `rank` numbers with so many rotated ones, None where there is."""
    for what, size, most in (("latents", rank, MOST_LATENT), ("rotated parts of keys", rotated, MOST_ROTATED)):
        if not LEAST_LATENT <= size <= most or size & (size - 1):
            return f"{what} have {size} numbers, and only powers of two from {LEAST_LATENT} to {most} can be"
    return None


def unfit_width(width: int) -> str | None:
    """Why rows of so many numbers can't be normed, or quantized with one scale each; None where they can."""
    return f"rows have {width:,} numbers, and at most {MOST_WIDTH:,} can be" if width > MOST_WIDTH else None
