"""Whether this process can use the Triton kernels, and which sizes of a model they take: told without torch and without
importing triton.

The one home of those sizes: kernels assert them, backends refuse by them when they are made, and who plans a run asks
before a model is loaded.
"""

from __future__ import annotations

import importlib.util
import math
import os

NOT_INSTALLED = "the package triton is not installed (pip install triton)"
NO_GPU = (
    "its kernels are for NVIDIA GPUs (device cuda); on a CPU only Triton's interpreter runs them, for tests and very "
    "slowly, where TRITON_INTERPRET=1 is set before Python starts"
)

MOST_HEAD_DIM = 256
# Of int8 caches: a head's codes in a block are followed by float32 scales, whose addresses are multiples of 4.
_SCALE_ALIGNMENT = 4
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


def unfit_heads(head_dim: int) -> str | None:
    """Why there is no attention of such heads, None where there is."""
    return f"heads have {head_dim} dimensions, and at most {MOST_HEAD_DIM} can be" if head_dim > MOST_HEAD_DIM else None


def unfit_int8_blocks(head_dim: int, block_size: int) -> str | None:
    """Why a KV cache in int8 of such heads can't be in blocks of so many tokens, None where it can."""
    if head_dim * block_size % _SCALE_ALIGNMENT == 0:
        return None
    multiple = _SCALE_ALIGNMENT // math.gcd(head_dim, _SCALE_ALIGNMENT)
    return (
        f"a KV cache in int8 of heads of {head_dim} dimensions needs blocks of a multiple of {multiple} tokens, not of "
        f"{block_size}"
    )


def unfit_latents(rank: int, rotated: int) -> str | None:
    """Why there is no attention to latents of `rank` numbers with so many rotated ones, None where there is."""
    for what, size, most in (("latents", rank, MOST_LATENT), ("rotated parts of keys", rotated, MOST_ROTATED)):
        if not LEAST_LATENT <= size <= most or size & (size - 1):
            return f"{what} have {size} numbers, and only powers of two from {LEAST_LATENT} to {most} can be"
    return None


def unfit_width(width: int) -> str | None:
    """Why rows of so many numbers can't be normed, or quantized with one scale each; None where they can."""
    return f"rows have {width:,} numbers, and at most {MOST_WIDTH:,} can be" if width > MOST_WIDTH else None
