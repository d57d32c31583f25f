"""Text to token ids and back: tokenizers, chat templates, prompts, per-row sampling settings, stop strings.

`tokenizer` (ids), `prompts` (a row to a prompt), `prepare` (rows to token ids), `stop_strings` (ids to text as they
come). No torch, no files but a model's tokenizer files. Third-party here: tokenizers and jinja2.
"""

from batchinfer.text.chat_template import ChatTemplate
from batchinfer.text.prepare import PreparedRow, prepare_rows
from batchinfer.text.prompts import PromptRenderer, PromptSpec, RenderedPrompt
from batchinfer.text.sampling import SamplingColumns, apply_overrides
from batchinfer.text.stop_strings import SequenceDecoder
from batchinfer.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "PreparedRow",
    "PromptRenderer",
    "PromptSpec",
    "RenderedPrompt",
    "SamplingColumns",
    "SequenceDecoder",
    "Tokenizer",
    "apply_overrides",
    "load_tokenizer",
    "prepare_rows",
]
