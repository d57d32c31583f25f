"""Attention over a paged KV cache, planned once per step and run once per layer.

`backend` picks how: in torch (planned by `plan`) or in C (`native`), both over the same tiles (`tiles`),
as is attention on NVIDIA GPUs (`triton`).
`spec` says what a layer's attention is, `context` is what a model's forward is handed.
"""
