"""What a model's files say: configs, tokenizer files, chat templates, end tokens, limits, hashes, tensor headers.

No torch and no tensor data here: planning a job needs this room only. The weights room reads the tensors.
"""

from batchinfer.modelfiles.files import ModelFiles, StoredTensor, TokenizerFiles
from batchinfer.modelfiles.open import open_model

__all__ = ["ModelFiles", "StoredTensor", "TokenizerFiles", "open_model"]
