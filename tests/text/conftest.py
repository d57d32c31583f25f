"""Tokenizers for the tests of this room: the demo model's, and small ones made here."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from batchinfer.modelfiles import ModelFiles, TokenizerFiles, open_model
from batchinfer.testing.small_tokenizers import CORPUS, byte_level, save, sentencepiece_metadata
from batchinfer.text import Tokenizer, load_tokenizer

DEMO_MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def demo_files() -> ModelFiles:
    if not DEMO_MODEL.exists():
        pytest.skip("the demo model is not there; scripts/quickstart fetches it")
    return open_model(str(DEMO_MODEL))


@pytest.fixture(scope="session")
def demo(demo_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(demo_files.tokenizer)


@pytest.fixture(scope="session")
def demo_oracle() -> Any:
    """transformers' tokenizer of the demo file, with the cut before each digit that its GGUF loader misses."""
    if not DEMO_MODEL.exists():
        pytest.skip("the demo model is not there; scripts/quickstart fetches it")
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = AutoTokenizer.from_pretrained(DEMO_MODEL.parent, gguf_file=DEMO_MODEL.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return oracle


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """GPT-2-like: no BOS."""
    files = save(byte_level(), tmp_path_factory.mktemp("chatml"), eos_token="<|im_end|>")
    return load_tokenizer(files)


@pytest.fixture(scope="session")
def llama_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A post-processor that puts BOS on, and EOS at the end as well."""
    tokenizer = byte_level(special=("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>", eos="</s>")
    return load_tokenizer(save(tokenizer, tmp_path_factory.mktemp("llama"), bos_token="<s>", eos_token="</s>"))


@pytest.fixture(scope="session")
def sentencepiece_model() -> Any:
    """A SentencePiece BPE with byte fallback, trained here. Returns its processor."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=560,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="session")
def spm(sentencepiece_model: Any) -> Tokenizer:
    return load_tokenizer(TokenizerFiles(kind="gguf", gguf=sentencepiece_metadata(sentencepiece_model)))
