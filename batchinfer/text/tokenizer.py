"""Text to token ids and back: `load_tokenizer`, `Tokenizer`.

Responsible for: encoding in batches on all cores, the BOS rule of raw prompts, special and control ids, decoding.
Not for: prompts and chat templates (`prompts`), stop strings (`stop_strings`), how a GGUF's metadata becomes a
tokenizer (`gguf_tokenizer`), user text that spells control tokens (`control_tokens`).

Nothing here changes after loading: no truncation, no padding, no flags, so that threads can share a tokenizer.
Parallelism is the tokenizers library's own (`RAYON_NUM_THREADS`, `TOKENIZERS_PARALLELISM`); a forked child
encodes on one thread, because the library's threads do not live on in it.

Text holding lone surrogates is not Unicode text: halves of a pair that stand together are joined, a lone half
becomes U+FFFD. Decoding joins the bytes of all tokens and reads them as UTF-8, one U+FFFD for each invalid part;
so a cut inside a character shows as one U+FFFD at the end (the token ids tell what it was).
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers

from batchinfer.errors import ModelError
from batchinfer.text.control_tokens import ControlTokens, without_control_tokens
from batchinfer.text.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
from batchinfer.text.token_bytes import TokenBytes, token_bytes
from batchinfer.text.word_cache import WordEncoder, encode_all

if TYPE_CHECKING:
    from batchinfer.modelfiles.files import TokenizerFiles

_DISABLE_IN_CHILD = "TOKENIZERS_PARALLELISM"


def load_tokenizer(files: TokenizerFiles, *, to_decode: bool = False) -> Tokenizer:
    """The tokenizer that a model's files describe. Raises ModelError where they can't be used.

    to_decode   mostly, or only: what encoding needs is built when it is used, where that is much of the whole, and what
                is wrong with it found out then
    """
    if files.kind == "fake":
        return Tokenizer(
            files,
            _ByteBackend(),
            vocab_size=int(files.config.get("vocab_size", 512)),
            bos_token_id=int(files.config.get("bos_token_id", 256)),
            eos_token_id=int(files.config.get("eos_token_id", 257)),
            named={"bos_token": "<bos>", "eos_token": "<eos>"},
            special={int(files.config.get("bos_token_id", 256)), int(files.config.get("eos_token_id", 257))},
            prefix=(),
        )
    _configure_parallelism()
    if files.kind == "gguf":
        if files.gguf is None:
            raise ModelError("the GGUF file has no tokenizer metadata (tokenizer.ggml.*); name one by model.tokenizer")
        gguf = read_gguf_tokenizer(files.gguf)
        backend = _GgufBackend(gguf)
        if not to_decode:
            backend.library()
        return Tokenizer(
            files,
            backend,
            vocab_size=gguf.vocab_size,
            bos_token_id=gguf.bos_token_id,
            eos_token_id=gguf.eos_token_id,
            named=gguf.named,
            special=set(gguf.special_ids),
            prefix=(gguf.bos_token_id,) if gguf.adds_bos() and gguf.bos_token_id is not None else (),
        )
    return _load_tokenizer_json(files)


class _Backend(Protocol):
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def control(self, special: frozenset[int]) -> ControlTokens: ...

    def added_texts(self) -> dict[str, bool]: ...

    def masked(self, control: ControlTokens) -> _Backend: ...

    def token_bytes(self, vocab_size: int) -> TokenBytes | None: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, text: str) -> int | None: ...


class Tokenizer:
    """Text <-> token ids of one model.

    vocab_size       largest id + 1 (a model's matrix may be padded beyond it)
    bos_token_id, eos_token_id   the tokenizer's own, or None
    special_ids      ids hidden by `skip_special_tokens`
    named            texts of the special tokens by their role ("bos_token": "<s>"), for chat templates
    prefix           ids that the tokenizer puts before a raw prompt, mostly BOS or nothing
    """

    def __init__(
        self,
        files: TokenizerFiles,
        backend: _Backend,
        *,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_id: int | None,
        named: dict[str, str],
        special: set[int],
        prefix: tuple[int, ...],
    ) -> None:
        self.files = files
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.named = named
        self.special_ids = frozenset(special)
        self.prefix = prefix
        self._backend = backend
        self._lock = threading.Lock()
        self._masked: _Backend | None = None
        self._bytes: tuple[TokenBytes | None] | None = None

    @cached_property
    def control(self) -> ControlTokens:
        return self._backend.control(self.special_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return load_tokenizer, (self.files,)

    def for_template(self, source: str) -> Tokenizer:
        """The same tokenizer, to which also the added tokens that a chat template writes are control tokens."""
        added = self._backend.added_texts()
        written = {text for text in added if text.strip() and text in source}
        if written <= self.control.texts:
            return self
        other = copy.copy(self)
        other._lock, other._masked = threading.Lock(), None
        other.control = self.control.extended(written, normalizing=any(added[text] for text in written))
        return other

    def special_texts(self, texts: Iterable[str]) -> dict[int, str]:
        """Those of `texts` that are exactly a special token's, by its id."""
        ids = ((self._backend.token_id(text), text) for text in texts)
        return {i: text for i, text in ids if i is not None and i in self.special_ids}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset() if self.eos_token_id is None else frozenset({self.eos_token_id})

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[list[int]]:
        """Token ids of each text.

        add_special_tokens   put `prefix` (BOS) before the ids, unless they begin with it already. Never an EOS.
        allow_special        False: the text's characters never become a control token (`control_tokens`)
        """
        if allow_special:
            return self._encode(self._backend, texts, add_special_tokens)
        texts = [self.control.without_renamed(text) for text in texts]
        return self._encode(self._masked_backend(), texts, add_special_tokens)

    def encode_masked_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """For `prompts`: texts in which `ControlTokens.mask` renamed the control tokens that are meant as such."""
        return self._encode(self._masked_backend(), texts, add_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens=add_special_tokens, allow_special=allow_special)[0]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def decode_batch(self, batch: Iterable[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Text of each id list. Ids beyond the vocabulary have no text."""
        pieces = self.token_bytes
        if pieces is None:
            hidden = self.special_ids if skip_special_tokens else frozenset()
            return [self._backend.decode([i for i in ids if i not in hidden]) for ids in batch]
        return [pieces.decode(ids, skip_special_tokens=skip_special_tokens) for ids in batch]

    @property
    def token_bytes(self) -> TokenBytes | None:
        """Bytes of each token, or None where the tokenizer's decoder can't be told token by token."""
        if self._bytes is None:
            table = self._backend.token_bytes(self.vocab_size)
            self._bytes = (None if table is None else table.with_special(self.special_ids),)
        return self._bytes[0]

    def _masked_backend(self) -> _Backend:
        with self._lock:
            if self._masked is None:
                self._masked = self._backend.masked(self.control)
            return self._masked

    def _encode(self, backend: _Backend, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        try:
            batch = backend.encode_batch(texts)
        except (TypeError, UnicodeEncodeError):  # what a lone surrogate raises, depending on the version
            batch = backend.encode_batch([_as_unicode(text) for text in texts])
        if add_special_tokens and self.prefix:
            prefix, size = list(self.prefix), len(self.prefix)
            batch = [ids if ids[:size] == prefix else prefix + ids for ids in batch]
        return batch


class _LibraryBackend:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = WordEncoder.of(tokenizer)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._words is not None:
            return encode_all(self._words, texts, self._encode_by_library)
        return self._encode_by_library(texts)

    def _encode_by_library(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def control(self, special: frozenset[int]) -> ControlTokens:
        return ControlTokens.of(self._tokenizer, special)

    def added_texts(self) -> dict[str, bool]:
        """Texts of the added tokens, and whether a normalizer could make them out of other characters."""
        normalizing = self._tokenizer.normalizer is not None
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {token.content: normalizing and token.normalized for token in added}

    def masked(self, control: ControlTokens) -> _Backend:
        return _LibraryBackend(without_control_tokens(self._tokenizer, control))

    def token_bytes(self, vocab_size: int) -> TokenBytes | None:
        return token_bytes(self._tokenizer, vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def token_id(self, text: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id


class _GgufBackend:
    """The library's tokenizer once it is asked for; bytes and ids of tokens without it."""

    def __init__(self, gguf: GgufTokenizer) -> None:
        self._gguf = gguf
        self._lock = threading.Lock()
        self._library: _LibraryBackend | None = None

    def library(self) -> _LibraryBackend:
        with self._lock:
            if self._library is None:
                self._library = _LibraryBackend(self._gguf.build())
            return self._library

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.library().encode_batch(texts)

    def control(self, special: frozenset[int]) -> ControlTokens:
        return self.library().control(special)

    def added_texts(self) -> dict[str, bool]:
        return self.library().added_texts()

    def masked(self, control: ControlTokens) -> _Backend:
        return self.library().masked(control)

    def token_bytes(self, vocab_size: int) -> TokenBytes:
        return self._gguf.token_bytes()

    def decode(self, ids: Sequence[int]) -> str:
        raise AssertionError("decoded through its bytes")

    def token_id(self, text: str) -> int | None:
        return self.library().token_id(text)


class _ByteBackend:
    """The fake models' tokenizer: the UTF-8 bytes of the text. Ids from 258 on decode to their number."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def control(self, special: frozenset[int]) -> ControlTokens:
        return ControlTokens(())

    def added_texts(self) -> dict[str, bool]:
        return {}

    def masked(self, control: ControlTokens) -> _Backend:
        return self

    def token_bytes(self, vocab_size: int) -> TokenBytes:
        def piece_of(token_id: int) -> bytes:
            if not 0 <= token_id < vocab_size:
                return b""
            return bytes([token_id]) if token_id < 256 else b" %d" % token_id

        return TokenBytes(piece_of)

    def decode(self, ids: Sequence[int]) -> str:
        raise AssertionError("decoded through its bytes")

    def token_id(self, text: str) -> int | None:
        return None


def _load_tokenizer_json(files: TokenizerFiles) -> Tokenizer:
    path, config = files.json_path, files.config
    if path is None or not path.exists():
        raise ModelError(
            f"{path or 'tokenizer.json'}: missing. A model folder needs a tokenizer.json; one that has only "
            "tokenizer.model (SentencePiece) must be converted first, for instance by "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) in transformers"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: not a tokenizer that the tokenizers library can read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = {role: text for role in config if role.endswith("_token") and (text := _content(config[role]))}
    _add_missing(tokenizer, config, named, str(path))
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = {role: tokenizer.token_to_id(text) for role, text in named.items()}
    more = map(_content, config.get("additional_special_tokens") or ())
    more_ids = (tokenizer.token_to_id(text) for text in more if text)
    special.update(i for i in (*ids.values(), *more_ids) if i is not None)
    bos = ids.get("bos_token")
    if "add_bos_token" in config or "add_eos_token" in config:
        # As in transformers: flags written in the config win over tokenizer.json's post-processor.
        prefix: tuple[int, ...] = (bos,) if config.get("add_bos_token") and bos is not None else ()
    else:
        prefix = _post_processor_prefix(tokenizer)
    return Tokenizer(
        files,
        _LibraryBackend(tokenizer),
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_token_id=bos,
        eos_token_id=ids.get("eos_token"),
        named=named,
        special=special,
        prefix=prefix,
    )


def _post_processor_prefix(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids that the post-processor puts before a text; what it puts after (an EOS) does not belong in a prompt."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


def _add_missing(tokenizer: tokenizers.Tokenizer, config: Any, named: dict[str, str], where: str) -> None:
    """Adds tokens that only tokenizer_config.json names; their ids must come out as it says."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for key, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        text = _content(entry)
        if not text or text in known:
            continue
        flags = {k: bool(entry[k]) for k in ("lstrip", "rstrip", "single_word", "normalized", "special") if k in entry}
        tokenizer.add_tokens([tokenizers.AddedToken(text, **flags)])
        known.add(text)
        if tokenizer.token_to_id(text) != int(key):
            raise ModelError(
                f"{where}: tokenizer_config.json gives token {text!r} the id {key}, but after tokenizer.json it "
                f"would be {tokenizer.token_to_id(text)}; the two files do not belong together"
            )
    for text in named.values():
        if text not in known and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _content(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _as_unicode(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _configure_parallelism() -> None:
    # With the variable set, the library neither warns at a fork nor changes itself; the child's hook below
    # keeps it from waiting for threads that only the parent has. What the user set stays as it is.
    os.environ.setdefault(_DISABLE_IN_CHILD, "true")


def _after_fork_in_child() -> None:
    if _DISABLE_IN_CHILD in os.environ:
        os.environ[_DISABLE_IN_CHILD] = "false"


os.register_at_fork(after_in_child=_after_fork_in_child)
