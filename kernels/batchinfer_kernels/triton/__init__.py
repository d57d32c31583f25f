"""Triton kernels for NVIDIA GPUs, each a module with what launches it, its default configurations and its `variants`.

What an operation computes is said in `reference` and in the modules of the formats (`kv8`, `w8`, `w4`, `fp8`,
`mxfp4`, `experts`, `mla`, `activation_formats`, `head`, `sampling`). Each kernel reduces in one fixed order whatever
the number of rows in the step, so that a row's bytes do not depend on the others: no atomics on floats, no split of a
sum that follows the batch.

`variants` says what can be compiled without a GPU and `compile_check` does it. With TRITON_INTERPRET=1 set before this
package is imported, kernels run in Triton's interpreter on tensors of the CPU; bfloat16 operands of `tl.dot` give wrong
numbers there (seen with 3.9).
"""

import os

# Products and sums may fuse, as they always did: stated, since Triton's default is about to change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
