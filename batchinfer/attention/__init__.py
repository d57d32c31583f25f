"""Attention over a paged KV cache: planned once per step (`plan`, over `tiles`), run once per layer
(`backend`).

`spec` says what a layer's attention is, `context` is what a model's forward is handed.
"""
