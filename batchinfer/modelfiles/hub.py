"""Brings a model from the Hugging Face hub into the local cache and says where it lies.

huggingface_hub is imported here only, and lazily. Its own environment variables (HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE) hold.
"""

from __future__ import annotations

import re
from pathlib import Path

from batchinfer.errors import ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZER_PATTERNS = ["*.json", "*.jinja", "additional_chat_templates/*"]
MODEL_PATTERNS = [*TOKENIZER_PATTERNS, "model*.safetensors"]


def looks_like_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and not path.endswith((".gguf", ".safetensors", ".json"))


def fetch(repo_id: str, *, revision: str | None, weights: bool) -> Path:
    """Folder of the repository in the local cache, downloaded as far as it is not there."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise ModelError(
            f"{repo_id}: no such folder or file; to fetch it from the Hugging Face hub, "
            "`pip install huggingface_hub`, or give the path of a downloaded copy"
        ) from error
    patterns = MODEL_PATTERNS if weights else TOKENIZER_PATTERNS
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id}: a gated repository; accept its terms on huggingface.co and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo_id}: the hub has no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repo_id}: neither a local path nor a repository on the hub that this token may see; "
            "check the name, or set HF_TOKEN for a private one"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{repo_id}: no such folder here, not in the local hub cache, and the hub can't be reached. "
            f"On a machine with a network run `hf download {repo_id}` (or copy the model's folder here) and "
            "give the path of that folder as model.path"
        ) from error
