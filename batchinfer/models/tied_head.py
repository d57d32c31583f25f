"""Whether a model's head is its embedding again."""

from __future__ import annotations

import logging

from batchinfer.modelfiles import ModelFiles
from batchinfer.weights import equal_values

_log = logging.getLogger(__name__)


def has_tied_head(files: ModelFiles, tied: bool) -> bool:
    """`tied`, as the config says it, unless a head is stored that is not the embedding: transformers takes it then."""
    embedding, head = files.tensors.get("model.embed_tokens.weight"), files.tensors.get("lm_head.weight")
    if not tied or embedding is None or head is None or equal_values(embedding, head):
        return tied
    _log.warning(
        "%s: tie_word_embeddings is true, but lm_head.weight is stored and differs from the embedding: not tied",
        files.root,
    )
    return False
