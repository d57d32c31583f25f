"""Identity of model and tokenizer files, independent of where they lie. See `ModelFiles.model_hash` for the rule."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError

WHOLE_FILE_LIMIT_BYTES = 256 << 20
HEAD_BYTES = 1 << 20
SAMPLE_BYTES = 64 << 10
NUM_SAMPLES = 64
# Keys of config.json that change when a model is copied or saved again.
NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version"})


def json_digest(value: Any) -> bytes:
    """sha256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).digest()


def file_digest(path: Path) -> bytes:
    """sha256 over a file's size and its bytes: all of them, or head and samples where it is large."""
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            digest = hashlib.sha256(size.to_bytes(8, "little"))
            if size <= WHOLE_FILE_LIMIT_BYTES:
                while block := f.read(HEAD_BYTES):
                    digest.update(block)
            else:
                digest.update(f.read(HEAD_BYTES))
                for i in range(NUM_SAMPLES):
                    # The last sample ends at the file's end, the first starts after the head.
                    f.seek(HEAD_BYTES + (size - HEAD_BYTES - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                    digest.update(f.read(SAMPLE_BYTES))
            return digest.digest()
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error


def model_hash(config: Mapping[str, Any], weight_files: Sequence[Path]) -> str:
    said = {key: value for key, value in config.items() if key not in NOT_THE_MODEL}
    digest = hashlib.sha256(b"batchinfer model 1\0" + json_digest(said))
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashlib releases the GIL
        for file_hash in pool.map(file_digest, weight_files):
            digest.update(file_hash)
    return digest.hexdigest()


def tokenizer_hash(kind: str, json_path: Path | None, config: Mapping[str, Any], gguf: Mapping[str, Any] | None) -> str:
    digest = hashlib.sha256(b"batchinfer tokenizer 1\0" + kind.encode())
    digest.update(file_digest(json_path) if json_path is not None else b"-")
    digest.update(json_digest(dict(config)))
    digest.update(json_digest(None if gguf is None else dict(gguf)))
    return digest.hexdigest()
