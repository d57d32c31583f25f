"""A tokenizer from a GGUF file's metadata (`tokenizer.ggml.*`, keys here without that prefix).

Responsible for: the model kinds "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE), the pre-tokenizer kinds
(`pre`), special and added tokens by their type, BOS flags. Not for: reading the file (`modelfiles`).

`pre` says how text is cut before merges apply; each kind is explicit, an unknown one is refused by name, because a
near miss gives other ids without a sign. transformers' own GGUF loader (5.x) ignores the kinds that it does not
list ("smollm" among them: it then misses the cut before each digit, and "  1" comes out otherwise than in the
model's own tokenizer.json). Here ids are those of the model's own tokenizer.json.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from batchinfer.errors import ModelError
from batchinfer.text.token_bytes import TokenBytes, byte_alphabet, byte_level_pieces, sentencepiece_pieces

log = logging.getLogger(__name__)

_SPACE = "▁"  # of SentencePiece
# Values of `token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Regular expressions of published tokenizer.json files; "" is ByteLevel's own expression (GPT-2's).
_CL100K_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a `pre` kind cuts text: single digits first or not, then `regex` ("" is GPT-2's).

    whole_words   a word that is in the vocabulary is taken whole, merges or not (`ignore_merges`)
    add_bos       what applies where the file has no `add_bos_token`
    """

    digits: bool = False
    regex: str = ""
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(regex=_CL100K_LIKE, whole_words=True, add_bos=True)
_QWEN = PreTokenizer(regex=_QWEN2)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": PreTokenizer(regex=_TEKKEN, whole_words=True, add_bos=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """What the metadata says, without what only encoding needs: that takes ten times as long, see `build`.

    tokens, types   by id, as stored
    special_ids     control tokens, and those named for a role
    """

    meta: Mapping[str, Any]
    byte_level: bool
    tokens: Sequence[str]
    types: Sequence[int]
    bos_token_id: int | None
    eos_token_id: int | None
    named: dict[str, str]
    special_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def adds_bos(self) -> bool:
        default = _pre_tokenizer(self.meta.get("pre")).add_bos if self.byte_level else True
        return bool(self.meta.get("add_bos_token", default))

    def build(self) -> tokenizers.Tokenizer:
        """The library's tokenizer. Raises ModelError for a pre-tokenizer that is not known, or without merges."""
        tokens, types = self.tokens, self.types
        if self.byte_level:
            tokenizer = _byte_level(tokens, types, _merges(self.meta), _pre_tokenizer(self.meta.get("pre")))
        else:
            tokenizer = _sentencepiece(tokens, types, self.meta)
        marked = (CONTROL, USER_DEFINED) if self.byte_level else (CONTROL, USER_DEFINED, UNKNOWN)
        added = [
            tokenizers.AddedToken(token, normalized=False, special=t != USER_DEFINED)
            for token, t in zip(tokens, types, strict=True)
            if t in marked and token
        ]
        # Named tokens that the file forgot to mark are control tokens all the same.
        known = {token.content for token in added}
        added += [
            tokenizers.AddedToken(text, normalized=False, special=True)
            for text in dict.fromkeys(self.named.values())
            if text not in known
        ]
        tokenizer.add_tokens(added)
        assert tokenizer.get_vocab_size(with_added_tokens=True) == len(tokens), "an added token got an id of its own"
        return tokenizer

    def token_bytes(self) -> TokenBytes:
        """What `token_bytes.token_bytes` has of the library's tokenizer."""
        tokens, types, special = self.tokens, self.types, self.special_ids
        if not self.byte_level:
            piece_of = sentencepiece_pieces(_SPACE, byte_fallback=True)
            strip = bool(self.meta.get("add_space_prefix", True))
            return TokenBytes(lambda i: piece_of(tokens[i]) if 0 <= i < len(tokens) else b"", strip_first_space=strip)
        byte_level = byte_level_pieces()

        def piece_of_id(i: int) -> bytes:
            if not 0 <= i < len(tokens):
                return b""
            return byte_level(tokens[i], types[i] in (NORMAL, CONTROL, USER_DEFINED) or i in special)

        return TokenBytes(piece_of_id)


def read_gguf_tokenizer(meta: Mapping[str, Any]) -> GgufTokenizer:
    """Raises ModelError for a kind that is not known, or for metadata that contradicts itself."""
    kind = meta.get("model")
    tokens = meta.get("tokens")
    if not tokens:
        raise ModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens); name a tokenizer by model.tokenizer")
    if set(map(type, tokens)) != {str}:
        tokens = [token.decode("utf-8", "replace") if isinstance(token, bytes) else str(token) for token in tokens]
    types = list(map(int, meta.get("token_type") or [NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise ModelError(
            f"the GGUF file has {len(tokens)} tokens (tokenizer.ggml.tokens) but {len(types)} token types "
            "(tokenizer.ggml.token_type); it is damaged"
        )
    if len(set(tokens)) != len(tokens):
        twice = next(token for n, token in enumerate(tokens) if token in tokens[:n])
        raise ModelError(f"the GGUF file's vocabulary holds {twice!r} twice (tokenizer.ggml.tokens); it is damaged")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"the GGUF file's tokenizer is of kind {kind!r} (tokenizer.ggml.model); batchinfer knows 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece BPE). Name a folder with a tokenizer.json by model.tokenizer"
        )
    roles = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    given = ((role, meta.get(key)) for role, key in roles.items())
    ids = {role: int(i) for role, i in given if i is not None and 0 <= int(i) < len(tokens)}
    hidden = (CONTROL,) if kind == "gpt2" else (CONTROL, UNKNOWN)
    return GgufTokenizer(
        meta=meta,
        byte_level=kind == "gpt2",
        tokens=tokens,
        types=types,
        bos_token_id=ids.get("bos_token"),
        eos_token_id=ids.get("eos_token"),
        named={role: tokens[i] for role, i in ids.items()},
        special_ids=frozenset(ids.values()).union(i for i, t in enumerate(types) if t in hidden),
    )


def _pre_tokenizer(name: Any) -> PreTokenizer:
    if name in (None, "default"):  # what converters write where they did not know the tokenizer either
        log.warning(
            "the GGUF file does not say how its tokenizer cuts text (tokenizer.ggml.pre is %s); taking GPT-2's way. "
            "If the model is younger than that, name its tokenizer by model.tokenizer",
            "missing" if name is None else repr(name),
        )
        return _GPT2
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's pre-tokenizer is {name!r} (tokenizer.ggml.pre), which batchinfer does not know; it knows "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Name a folder with the model's tokenizer.json by model.tokenizer"
        )
    return PRE_TOKENIZERS[name]


def _merges(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = meta.get("merges")
    if merges is None:
        raise ModelError("the GGUF file has no merges (tokenizer.ggml.merges), which its byte-level BPE needs")
    pairs = []
    for merge in merges:
        left, _, right = (merge.decode("utf-8") if isinstance(merge, bytes) else merge).partition(" ")
        pairs.append((left, right))
    return pairs


def _byte_level(
    tokens: Sequence[str], types: Sequence[int], merges: list[tuple[str, str]], pre: PreTokenizer
) -> tokenizers.Tokenizer:
    alphabet = byte_alphabet()
    spelled = set(alphabet.values())
    # Mostly all are spelled so already: one look at all of them is much faster than one at each.
    all_spelled = set("".join([token for token, t in zip(tokens, types, strict=True) if t == NORMAL])) <= spelled
    vocab = {}
    for i, (token, t) in enumerate(zip(tokens, types, strict=True)):
        # User-defined tokens are stored as text; as added tokens they keep that spelling.
        if t == NORMAL and not all_spelled and not set(token) <= spelled:
            token = "".join(alphabet[byte] for byte in token.encode("utf-8"))
        vocab[token] = i
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.regex:
        steps.append(pre_tokenizers.Split(Regex(pre.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    if pre.regex == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], types: Sequence[int], meta: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if "merges" in meta:
        merges = _merges(meta)
    else:
        scores = meta.get("scores")
        if scores is None or len(scores) != len(tokens):
            raise ModelError("the GGUF file has no score for each token (tokenizer.ggml.scores), which its kind needs")
        merges = _merges_from_scores(tokens, types, scores)
    unknown = meta.get("unknown_token_id")
    if unknown is None:
        unknown = next((i for i, t in enumerate(types) if t == UNKNOWN), None)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[int(unknown)],
            fuse_unk=True,
            byte_fallback=any(t == BYTE for t in types),
        )
    )
    prefix = bool(meta.get("add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return tokenizer


def _merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose joined piece has the best score; as an ordered list of pairs.

    Only ordinary pieces take part: a control token must never grow out of text. Of the pairs that make the same
    piece, or pieces of equal score, longer parts come first, as in Hugging Face's conversion.
    """
    usable = {token: i for i, (token, t) in enumerate(zip(tokens, types, strict=True)) if t in (NORMAL, UNUSED)}
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for order, token in enumerate(usable):
        score = float(scores[usable[token]])
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                found.append((-score, -len(left), -len(right), order, usable[left], left, right))
    found.sort()
    return [(entry[5], entry[6]) for entry in found]
