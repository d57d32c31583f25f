"""Ids from GGUF metadata equal those of the model's own tokenizer."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.errors import ModelError
from batchinfer.modelfiles import ModelFiles, TokenizerFiles
from batchinfer.testing.small_tokenizers import CORPUS, NASTY, byte_level, sentencepiece_metadata
from batchinfer.text import Tokenizer, load_tokenizer
from batchinfer.text.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
from batchinfer.text.token_bytes import token_bytes

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"


def gguf(meta: dict[str, Any]) -> TokenizerFiles:
    return TokenizerFiles(kind="gguf", gguf=meta)


def metadata(**more: Any) -> dict[str, Any]:
    """A byte-level BPE as GGUF metadata; <|im_start|> is control, <think> user-defined."""
    state = json.loads(byte_level(added=("<think>",)).to_str())
    tokens = [*sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__), "<think>"]
    types = [3 if token.startswith("<|") and token.endswith("|>") else 1 for token in tokens]
    types[-1] = 4
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 2,
        **more,
    }


def real_texts() -> list[str]:
    keys = {"ifeval": "prompt", "gsm8k_test": "question", "humaneval": "prompt"}
    files = [(SHARED_DATA / f"{name}.jsonl", key) for name, key in keys.items()]
    there = [(path.read_text().splitlines(), key) for path, key in files if path.exists()]
    return [json.loads(line)[key] for lines, key in there for line in lines]


def test_demo_ids_equal_transformers(demo: Tokenizer, demo_oracle: Any) -> None:
    texts = NASTY + CORPUS + real_texts()
    ids = demo.encode_batch(texts)
    assert ids == demo_oracle(texts).input_ids
    assert demo.decode_batch(ids, skip_special_tokens=False) == [demo_oracle.decode(row) for row in ids]
    assert demo.decode_batch(ids) == [demo_oracle.decode(row, skip_special_tokens=True) for row in ids]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_demo_ids_equal_transformers_on_any_text(demo: Tokenizer, demo_oracle: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == demo_oracle(text).input_ids
    # Not always `text`: this vocabulary lacks a few control characters.
    assert demo.decode(ids, skip_special_tokens=False) == demo_oracle.decode(ids)


def test_demo_ids_equal_transformers_unchanged_but_before_digits(demo: Tokenizer, demo_oracle: Any) -> None:
    """The oracle's one change is needed: the model's own tokenizer.json makes "  1" two tokens, not " ", " ", "1"."""
    assert [demo.decode([i]) for i in demo.encode("x  1")] == ["x", "  ", "1"]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_pre_kinds_cut_like_transformers(pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    meta = metadata(pre=pre)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle, _ = convert_gguf_tokenizer("llama", {**meta, "tokenizer_type": "gpt2", "pre_tokenizer_type": pre})
    mine = load_tokenizer(gguf(meta))
    texts = [text for text in NASTY + CORPUS if pre != "qwen2" or ("\u0301" not in text and "\u212b" not in text)]
    theirs = [oracle.encode(text, add_special_tokens=False).ids for text in texts]
    assert mine.encode_batch(texts, add_special_tokens=False) == theirs


def test_llama3_takes_whole_words_and_bos() -> None:
    tokenizer = load_tokenizer(gguf(metadata(pre="llama-bpe")))
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id == 0
    assert load_tokenizer(gguf(metadata(pre="llama-bpe", add_bos_token=False))).encode("hi")[0] != 0


def test_unknown_pre_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'mystery-9'.*tokenizer\.ggml\.pre.*smollm"):
        load_tokenizer(gguf(metadata(pre="mystery-9")))


def test_missing_pre_is_gpt2_and_said(caplog: pytest.LogCaptureFixture) -> None:
    meta = metadata()
    del meta["pre"]
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(gguf(meta))
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.encode_batch(CORPUS) == load_tokenizer(gguf(metadata())).encode_batch(CORPUS)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", None])
def test_unknown_model_kind_is_refused_by_name(kind: str | None) -> None:
    with pytest.raises(ModelError, match=rf"{kind!r}.*tokenizer\.ggml\.model"):
        load_tokenizer(gguf(metadata(model=kind)))


def test_damaged_metadata_is_told() -> None:
    meta = metadata()
    with pytest.raises(ModelError, match="token types"):
        load_tokenizer(gguf({**meta, "token_type": meta["token_type"][:-1]}))
    with pytest.raises(ModelError, match="no vocabulary"):
        load_tokenizer(gguf({"model": "gpt2"}))
    with pytest.raises(ModelError, match="no merges"):
        load_tokenizer(gguf({key: value for key, value in meta.items() if key != "merges"}))
    with pytest.raises(ModelError, match="twice"):
        load_tokenizer(gguf({**meta, "tokens": [*meta["tokens"][:-1], "<|im_end|>"]}))


def test_token_types_make_special_and_added_tokens() -> None:
    tokenizer = load_tokenizer(gguf(metadata()))
    think = tokenizer.vocab_size - 1
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    assert [i for i in ids if i in (0, 1, 2, think)] == [1, think, 2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think>b<|im_end|>"


def as_text_and_unused() -> dict[str, Any]:
    """With tokens that are stored as text, and of each type with letters that stand for no byte, or for other ones."""
    meta = metadata()
    more = [f"{word}{t}" for t in (1, 2, 4, 5) for word in ("été ", "日本", "\x7f", "a\u00adb", "Ġé", "Ġx")]
    types = [t for t in (1, 2, 4, 5) for _ in range(6)]
    return {**meta, "tokens": meta["tokens"] + more, "token_type": meta["token_type"] + types}


def named_but_unmarked() -> dict[str, Any]:
    meta = as_text_and_unused()
    unused = meta["tokens"].index("日本5")
    return {**meta, "eos_token_id": unused, "padding_token_id": 40, "unknown_token_id": len(meta["tokens"])}


@pytest.mark.parametrize(
    "make",
    [
        lambda _: metadata(),
        lambda _: as_text_and_unused(),
        lambda _: named_but_unmarked(),
        sentencepiece_metadata,
        lambda model: sentencepiece_metadata(model, add_space_prefix=False, padding_token_id=5),
    ],
)
def test_bytes_of_tokens_need_no_library(make: Any, sentencepiece_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = make(sentencepiece_model)
    library = read_gguf_tokenizer(meta).build()
    slow, places = token_bytes(library, len(meta["tokens"])), range(-2, len(meta["tokens"]) + 2)
    assert slow is not None
    with monkeypatch.context() as patch:
        patch.setattr(GgufTokenizer, "build", lambda self: pytest.fail("a tokenizer to decode with was built whole"))
        tokenizer = load_tokenizer(gguf(meta), to_decode=True)
        quick = tokenizer.token_bytes
        assert quick is not None and quick.strip_first_space == slow.strip_first_space
        slow = slow.with_special(tokenizer.special_ids)
        for skip in (False, True):
            pieces = [quick.piece(i, skip_special_tokens=skip) for i in places]
            assert pieces == [slow.piece(i, skip_special_tokens=skip) for i in places]
        assert sum(map(bool, pieces)) > 100
        ids = list(range(3, len(meta["tokens"])))
        assert tokenizer.decode(ids) == slow.decode(ids, skip_special_tokens=True)
    whole = load_tokenizer(gguf(meta))
    assert tokenizer.encode_batch(CORPUS) == whole.encode_batch(CORPUS)
    assert (tokenizer.vocab_size, tokenizer.named, tokenizer.prefix) == (whole.vocab_size, whole.named, whole.prefix)
    assert tokenizer.control.texts == whole.control.texts


def test_sentencepiece_ids_equal_transformers(spm: Tokenizer, sentencepiece_model: Any) -> None:
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    meta = sentencepiece_metadata(sentencepiece_model)
    vocab = {token: i for i, token in enumerate(meta["tokens"])}
    merges = generate_merges(vocab, dict(zip(meta["tokens"], meta["scores"], strict=True)))
    oracle = LlamaTokenizer(vocab=vocab, merges=merges)
    texts = [*NASTY, *CORPUS, "thermal", "a<s>b</s>c", "<s> x", "▁x"]
    assert spm.encode_batch(texts, add_special_tokens=False) == oracle(texts, add_special_tokens=False).input_ids


def test_sentencepiece_ids_equal_the_library(spm: Tokenizer, sentencepiece_model: Any) -> None:
    """But for texts that begin with a space: Hugging Face's Metaspace takes it for the prefix space."""
    texts = [text for text in [*NASTY, *CORPUS, "thermal", "a  b"] if text[:1] not in (" ", "\0")]
    assert spm.encode_batch(texts, add_special_tokens=False) == [sentencepiece_model.encode(text) for text in texts]


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁\0"), max_size=40).filter(
        lambda t: t[:1] != " "
    )
)
def test_sentencepiece_ids_equal_the_library_on_any_text(spm: Tokenizer, sentencepiece_model: Any, text: str) -> None:
    if not any(marker in text for marker in ("<s>", "</s>", "<unk>")):
        ids = spm.encode(text, add_special_tokens=False)
        assert ids == sentencepiece_model.encode(text)
        assert spm.decode(ids) == text


def test_sentencepiece_flags(sentencepiece_model: Any) -> None:
    def load(**more: Any) -> Tokenizer:
        return load_tokenizer(gguf(sentencepiece_metadata(sentencepiece_model, **more)))

    assert load().encode("fox")[0] == 1
    assert load(add_bos_token=False).encode("fox")[0] != 1
    bare = load(add_space_prefix=False, add_bos_token=False)
    assert bare.decode(bare.encode(" fox")) == " fox"
    assert bare.encode("fox") != load(add_bos_token=False).encode("fox")


def test_control_tokens_of_sentencepiece_never_grow_from_text(spm: Tokenizer) -> None:
    ids = spm.encode("a<s>b</s><unk>", add_special_tokens=False, allow_special=False)
    assert not set(ids) & spm.special_ids
    assert spm.decode(ids) == "a<s>b</s><unk>"


def test_pickled_and_loaded_again(demo: Tokenizer, demo_files: ModelFiles) -> None:
    import pickle

    again = pickle.loads(pickle.dumps(demo))
    assert again.encode_batch(NASTY) == demo.encode_batch(NASTY)
    assert again.special_ids == demo.special_ids
