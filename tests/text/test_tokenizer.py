"""tokenizer.json: loading, BOS flags, surrogates, threads, forks."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from batchinfer.errors import ModelError
from batchinfer.modelfiles import TokenizerFiles
from batchinfer.testing.small_tokenizers import CORPUS, NASTY, byte_level, save
from batchinfer.text import Tokenizer, load_tokenizer
from batchinfer.text.word_cache import WordEncoder, _known_chars


def test_a_folder_with_tokenizer_model_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x00")
    for path in (None, tmp_path / "tokenizer.json"):
        with pytest.raises(ModelError, match=r"tokenizer\.json.*tokenizer\.model"):
            load_tokenizer(TokenizerFiles(kind="tokenizer_json", json_path=path))


def test_a_broken_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(TokenizerFiles(kind="tokenizer_json", json_path=tmp_path / "tokenizer.json"))


def test_stored_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    stored = byte_level()
    stored.enable_truncation(4)
    stored.enable_padding(length=50)
    tokenizer = load_tokenizer(save(stored, tmp_path))
    assert tokenizer.encode_batch(CORPUS) == [e.ids for e in byte_level().encode_batch(CORPUS)]


def test_bos_is_put_on_once_and_eos_never(llama_like: Tokenizer) -> None:
    bos = llama_like.bos_token_id
    plain = llama_like.encode("fox", add_special_tokens=False)
    assert llama_like.encode("fox") == [bos, *plain]
    assert llama_like.encode("<s>fox") == [bos, *plain]
    assert llama_like.encode("") == [bos]
    assert llama_like.encode("fox</s>") == [bos, *plain, llama_like.eos_token_id]


@pytest.mark.parametrize(("config", "expected"), [({"add_bos_token": True}, True), ({"add_bos_token": False}, False)])
def test_flags_of_the_config_win_over_the_post_processor(
    tmp_path: Path, config: dict[str, bool], expected: bool
) -> None:
    for put_on in ("<s>", None):
        stored = byte_level(special=("<s>", "</s>"), bos=put_on)
        tokenizer = load_tokenizer(save(stored, tmp_path / str(put_on), bos_token="<s>", **config))
        assert (tokenizer.encode("fox")[0] == tokenizer.bos_token_id) is expected


def test_tokens_that_only_the_config_names(tmp_path: Path) -> None:
    stored = byte_level()
    size = stored.get_vocab_size()
    config = {
        "added_tokens_decoder": {str(size): {"content": "<tool>", "special": True}},
        "eos_token": {"content": "<tool>"},
    }
    tokenizer = load_tokenizer(save(stored, tmp_path, **config))
    assert tokenizer.encode("<tool>") == [size] == [tokenizer.eos_token_id]
    assert tokenizer.vocab_size == size + 1
    assert size in tokenizer.special_ids
    config["added_tokens_decoder"] = {str(size + 7): {"content": "<tool>"}}
    with pytest.raises(ModelError, match="do not belong together"):
        load_tokenizer(save(stored, tmp_path, **config))


def test_special_tokens_that_only_the_config_names(tmp_path: Path) -> None:
    stored = byte_level(added=("<image>", "<tool>"))
    config = {"image_token": {"content": "<image>"}, "additional_special_tokens": ["<tool>"], "add_bos_token": False}
    tokenizer = load_tokenizer(save(stored, tmp_path, **config))
    assert tokenizer.named == {"image_token": "<image>"}
    assert tokenizer.decode(tokenizer.encode("a<image>b<tool>c")) == "abc"


def test_surrogates(demo: Tokenizer, chatml: Tokenizer) -> None:
    for tokenizer in (demo, chatml):
        assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")
        assert tokenizer.encode("a\udc80b") == tokenizer.encode("a\ufffdb")
        assert tokenizer.encode_batch(["\ud800", "fine", "\x00", "\ufffe"]) == [
            tokenizer.encode(text) for text in ("\ufffd", "fine", "\x00", "\ufffe")
        ]
    assert len(demo.encode("a" + "\u0301" * 10_000)) > 0


def test_threads_share_a_tokenizer(chatml: Tokenizer) -> None:
    rng = random.Random(5)
    texts = [" ".join(rng.choices(CORPUS + NASTY, k=2))[: rng.randint(0, 200)] for _ in range(1000)]
    texts += [f"<|im_end|>{n} \ud800" for n in range(50)]
    expected = [chatml.encode_batch(texts), chatml.encode_batch(texts, allow_special=False)]
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda safe: (safe, chatml.encode_batch(texts, allow_special=not safe)), [0, 1] * 8):
            assert got[1] == expected[got[0]]
        decoded = list(pool.map(chatml.decode_batch, [expected[0]] * 8))
    assert all(texts == decoded[0] for texts in decoded)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_encodes(demo: Tokenizer) -> None:
    texts = ["漢字 " + text for text in CORPUS] * 20  # not for the word cache: the library's own threads have run
    expected = demo.encode_batch(texts)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"1" if demo.encode_batch(texts) == expected else b"0")
        os._exit(0)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"1"
    finally:
        os.close(reader)
        os.waitpid(child, 0)


def test_fake_tokenizer_is_bytes() -> None:
    tokenizer = load_tokenizer(TokenizerFiles(kind="fake", config={"vocab_size": 300}))
    assert tokenizer.encode("hé", allow_special=False) == [104, 0xC3, 0xA9]
    assert tokenizer.decode([104, 0xC3, 0xA9, 256, 257, 299]) == "hé 299"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (300, 256, {257})
    assert tokenizer.encode("") == []


def by_library(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


@pytest.fixture(scope="module", params=["gpt2", "digits", "llama3", "qwen2"])
def library(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    from batchinfer.text.gguf_tokenizer import PRE_TOKENIZERS

    tokenizer = byte_level(added=("<think>", "  \n"))
    pre = PRE_TOKENIZERS[{"digits": "smollm"}.get(request.param, request.param)]
    steps = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.regex:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pre.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if request.param == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def test_remembered_words_give_the_librarys_ids_for_each_known_character(library: tokenizers.Tokenizer) -> None:
    words = WordEncoder.of(library)
    assert words is not None
    around = ("{}", "a{}", "{} 1", "'{}S  {}", "1{}2", "\n{}\n", " {}  {}", "  {}", ".{}.")
    texts = [form.replace("{}", char) for char in _known_chars() for form in around]
    assert [words.encode(text) for text in texts] == by_library(library, texts)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from(" \n\t\r'sSdLlveREmMtT019aéЯ²½._-<>|\u00a0\u0301漢think"), max_size=40))
def test_remembered_words_give_the_librarys_ids(library: tokenizers.Tokenizer, text: str) -> None:
    words = WordEncoder.of(library)
    assert words is not None
    assert words.encode(text) in (None, by_library(library, [text])[0])


def test_word_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchinfer.text import word_cache

    monkeypatch.setattr(word_cache, "_MAX_WORDS", 50)
    library = byte_level()
    words = WordEncoder.of(library)
    assert words is not None
    texts = [f"word{n} x{'y' * 100}{n}" for n in range(200)]
    assert [words.encode(text) for text in texts] == by_library(library, texts)
    assert len(words._words) <= 50


def test_other_tokenizers_are_left_to_the_library(tmp_path: Path) -> None:
    """A WordPiece tokenizer: no byte table, no word cache; ids and text are the library's."""
    vocab = {"[UNK]": 0, "the": 1, "fo": 2, "##x": 3, "[CLS]": 4}
    stored = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    stored.pre_tokenizer = pre_tokenizers.Whitespace()
    stored.decoder = decoders.WordPiece()
    stored.add_special_tokens(["[CLS]"])
    tokenizer = load_tokenizer(save(stored, tmp_path))
    assert tokenizer.encode("the fox [CLS]") == [1, 2, 3, 4]
    assert tokenizer.decode([1, 2, 3, 4]) == "the fox"
    assert tokenizer.token_bytes is None
    from batchinfer.text import SequenceDecoder

    decoder = SequenceDecoder(tokenizer, ["x"])
    assert [decoder.push(i) for i in (1, 2, 3)] == [None, None, "x"]
    assert decoder.finish() == "the fo"
    decoder = SequenceDecoder(tokenizer, ["zz"])
    ids = [1, 2, 3] * 50
    for i in ids:
        decoder.push(i)
    assert decoder.finish() == tokenizer.decode(ids)
