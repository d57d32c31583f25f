"""What `scripts/gpu_check` and `scripts/bench_kernels` are made of: one GPU proven and measured by one command.

`check` is the whole of it: `suite` runs the tests, `laws` the engine against itself, `kernel_benches` and
`engine_benches` measure. `outcome` says what came of each, `child` runs them in processes of their own. `kernels` and
`tuner` are for `scripts/bench_kernels`. Needs torch, triton, safetensors, tokenizers, numpy, jinja2 and pytest only.
"""
