"""What a model's files say, as data: `ModelFiles` and `TokenizerFiles`.

Responsible for: the two frozen types that travel to the text room, the engine and the job. Not for: finding or
reading the files (`open`, `huggingface`, `gguf`), nor tensor data (the weights room).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchinfer.errors import ModelError
from batchinfer.modelfiles import hashes

ModelKind = Literal["hf", "gguf", "fake"]
TokenizerKind = Literal["tokenizer_json", "gguf", "fake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Where a tokenizer comes from; picklable, so that it can be loaded again in another process.

    json_path   tokenizer.json, for kind "tokenizer_json"
    config      tokenizer_config.json without its chat templates (special_tokens_map.json fills keys it lacks)
    gguf        for kind "gguf": the `tokenizer.ggml.*` metadata as Python values, keys without that prefix
    """

    kind: TokenizerKind
    json_path: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None

    def hash(self) -> str:
        """sha256 (hex) over everything that decides text <-> ids. Chat templates are not part of it."""
        return hashes.tokenizer_hash(self.kind, self.json_path, self.config, self.gguf)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as stored. `dtype` is the file format's own name (F32, BF16, Q4_1, ...); `shape` is
    outermost first (for GGUF that is the reverse of the file's order); bytes are `offset .. offset + nbytes`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """An opened model: everything but tensor data.

    config             in the form of Hugging Face's config.json, also for GGUF
    generation_config  generation_config.json, or {}
    chat_templates     by name; the one to use unless told otherwise is "default"
    weight_files       the files that are read, and no others
    tensors            what these files hold, by name, from their headers
    eos_token_ids      the union of all sources: config, generation_config, tokenizer or GGUF metadata
    """

    name: str
    kind: ModelKind
    root: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerFiles
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    weight_files: tuple[Path, ...] = ()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def max_model_len(self) -> int:
        """Positions that the model has: max_position_embeddings, which RoPE scaling does not multiply again."""
        value = self.config.get("max_position_embeddings")
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"{self.root}: max_position_embeddings is {value!r} in the model's config; "
                "it must be a positive integer (the number of positions the model was made for)"
            )
        return value

    @property
    def suggested_sampling(self) -> dict[str, Any]:
        """Sampling settings that generation_config suggests, for whatever the user leaves out.

        temperature, top_p, top_k and min_p only where it says do_sample: true (greedy models carry values there that
        they never use; do_sample without a temperature means 1); repetition_penalty always.
        """
        suggested = self.generation_config
        names: tuple[str, ...] = ("repetition_penalty",)
        found: dict[str, Any] = {}
        if suggested.get("do_sample") is True:
            names += ("temperature", "top_p", "top_k", "min_p")
            found["temperature"] = 1.0
        return found | {name: suggested[name] for name in names if suggested.get(name) is not None}

    @property
    def num_parameters(self) -> int:
        """Elements of all stored tensors (a tied head counts once where it is stored once)."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def model_hash(self) -> str:
        """sha256 (hex) over the config and the weight files.

        Files up to 256 MiB are read whole; of larger ones the first MiB, the size and 64 blocks of 64 KiB at
        fixed places are read, so that a model of any size is identified in seconds. A change of single weights
        between those blocks is not seen; a re-trained, re-quantized or re-packed file is.
        """
        return hashes.model_hash(self.config, self.weight_files)

    def tokenizer_hash(self) -> str:
        return self.tokenizer.hash()
