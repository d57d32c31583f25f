"""Text to token ids and back: tokenizers, chat templates, prompts, per-row sampling settings, stop strings.

`tokenizer` (ids), `prompts` (a row to a prompt), `prepare` (rows to token ids), `stop_strings` (ids to text as they
come). No torch, no files but a model's tokenizer files. Third-party here: tokenizers and jinja2.
"""

from batchinfer.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
