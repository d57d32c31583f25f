"""Text as it comes, and stop strings."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.errors import ConfigError
from batchinfer.modelfiles import TokenizerFiles
from batchinfer.text import SequenceDecoder, Tokenizer, load_tokenizer
from batchinfer.types.request import SamplingParams

HARD = [
    "🙂🙂",
    "👨‍👩‍👧‍👦",
    "e\u0301",
    "да гледам ќе идев",
    "漢字" * 25,
    "a genuine \ufffd here",
    "mixed é 🙂 text",
]


@pytest.fixture(scope="module")
def by_bytes() -> Tokenizer:
    """One token a byte: every border inside a character is a border of tokens."""
    return load_tokenizer(TokenizerFiles(kind="fake", config={"vocab_size": 512}))


@pytest.fixture(params=["chatml", "spm", "by_bytes", "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def run(tokenizer: Tokenizer, ids: list[int], stop: list[str], **options: object) -> tuple[str, str | None, int]:
    """Text, matched stop, tokens used."""
    decoder = SequenceDecoder(tokenizer, stop, **options)  # type: ignore[arg-type]
    for used, i in enumerate(ids, 1):
        if decoder.push(i) is not None:
            return decoder.finish(), decoder.stop_reason, used
    return decoder.finish(), decoder.stop_reason, len(ids)


@pytest.mark.parametrize("text", HARD)
def test_cut_after_every_token_is_the_decode_of_all_ids(tokenizer: Tokenizer, text: str) -> None:
    ids = ids_of(tokenizer, text)
    shown = []
    for size in range(len(ids) + 1):
        decoder = SequenceDecoder(tokenizer, ["never there"])
        for i in ids[:size]:
            assert decoder.push(i) is None
        shown.append(decoder.text)
        got = decoder.finish()
        assert got == tokenizer.decode(ids[:size])
        got.encode("utf-8")
        assert got.count("\ufffd") <= 1 + text.count("\ufffd")  # an incomplete character is one U+FFFD
        assert text.startswith(got.removesuffix("\ufffd"))
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert tokenizer.decode(ids) == text


def test_lone_bytes_are_one_replacement_character(by_bytes: Tokenizer, spm: Tokenizer) -> None:
    assert by_bytes.decode([0xF0, 0x9F]) == "\ufffd"
    first, second = (spm._backend.token_id(name) for name in ("<0xF0>", "<0x9F>"))  # type: ignore[attr-defined]
    assert spm.decode([first, second]) == "\ufffd"


def test_ids_beyond_the_vocabulary_have_no_text(chatml: Tokenizer) -> None:
    ids = ids_of(chatml, "fox")
    assert chatml.decode([*ids, chatml.vocab_size + 5]) == "fox"
    assert run(chatml, [*ids, 10**9], ["x!"])[0] == "fox"


@pytest.mark.parametrize(
    ("stop", "before", "after"),
    [
        (["END"], "abc###", "abc###END"),
        (["#E"], "abc##", "abc###E"),
        (["c##"], "ab", "abc##"),
        (["###", "#"], "abc", "abc#"),
        (["#", "###"], "abc", "abc#"),
        (["#END", "END"], "abc##", "abc###END"),
        (["a"], "", "a"),
        (["abc"], "", "abc"),
        (["xyz"], "abc###END###", "abc###END###xyz"),
        ([f"nothing{n}" for n in range(99)] + ["ND"], "abc###E", "abc###END"),
    ],
)
def test_the_earliest_match_ends_the_text(tokenizer: Tokenizer, stop: list[str], before: str, after: str) -> None:
    ids = ids_of(tokenizer, "abc###END###xyz")
    excluded, reason, used = run(tokenizer, ids, stop)
    included, _, _ = run(tokenizer, ids, stop, include_stop_str_in_output=True)
    assert (excluded, included) == (before, after)
    assert reason in stop
    assert included == excluded + str(reason)
    # the text and the ids that made it: the stop is complete with the last id used, and not before
    assert included in tokenizer.decode(ids[:used])
    assert included not in tokenizer.decode(ids[: used - 1])


def test_a_stop_string_with_a_character_of_several_tokens(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, ids_of(tokenizer, "so 🙂 yes"), ["🙂"])[:2] == ("so ", "🙂")
    assert run(tokenizer, ids_of(tokenizer, "so 🙂 yes"), [" 🙂 y"])[:2] == ("so", " 🙂 y")


def test_two_line_breaks_as_one_token_and_as_two(demo: Tokenizer) -> None:
    one = [*demo.encode("a"), *demo.encode("\n\n"), *demo.encode("b")]
    single = demo.encode("\n")
    two = [*demo.encode("a"), *single, *single, *demo.encode("b")]
    assert len(one) < len(two)
    assert run(demo, one, ["\n\n"]) == ("a", "\n\n", 2)
    assert run(demo, two, ["\n\n"]) == ("a", "\n\n", 3)


def test_no_match_leaves_everything(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "abc")
    assert run(tokenizer, ids, ["abcd", "a stop longer than all that was generated"]) == ("abc", None, len(ids))


def test_a_special_token_named_as_stop_matches_though_it_is_hidden(chatml: Tokenizer) -> None:
    ids = chatml.encode("fox<|im_end|>dog")
    used = ids.index(chatml.eos_token_id or 0) + 1
    assert run(chatml, ids, ["<|im_end|>"]) == ("fox", "<|im_end|>", used)
    assert run(chatml, ids, ["<|im_end|>"], include_stop_str_in_output=True)[0] == "fox<|im_end|>"
    assert run(chatml, ids, ["<|im_end|>"], skip_special_tokens=False)[0] == "fox"
    assert run(chatml, ids, [])[0] == "foxdog"


def test_before_min_tokens_nothing_stops(by_bytes: Tokenizer) -> None:
    ids = list(b"ab#cd#ef")
    assert run(by_bytes, ids, ["#"]) == ("ab", "#", 3)
    assert run(by_bytes, ids, ["#"], min_tokens=3) == ("ab", "#", 3)  # the third token completes it
    assert run(by_bytes, ids, ["#"], min_tokens=4) == ("ab#cd", "#", 6)
    assert run(by_bytes, ids, ["b#c"], min_tokens=4) == ("a", "b#c", 4)  # complete with the fourth token
    assert run(by_bytes, ids, ["#"], min_tokens=100) == ("ab#cd#ef", None, len(ids))


def test_empty_stop_string_is_refused(by_bytes: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="non-empty"):
        SequenceDecoder(by_bytes, [""])
    with pytest.raises(ConfigError, match="non-empty"):
        SamplingParams(stop=[""])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_match_is_the_same_however_text_is_cut_into_tokens(
    spm: Tokenizer, by_bytes: Tokenizer, data: st.DataObject
) -> None:
    alphabet = st.sampled_from("ab🙂é#")
    text = data.draw(st.text(alphabet, min_size=1, max_size=12))
    stop = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=4), min_size=1, max_size=4))
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    # the specification: the match that is complete first, of several the longest
    expected = text[: min(ends)[1]] if ends else text
    for tokenizer in (spm, by_bytes):
        assert run(tokenizer, ids_of(tokenizer, text), stop)[0] == expected


def test_work_for_a_token_does_not_grow_with_the_text(by_bytes: Tokenizer) -> None:
    decoder = SequenceDecoder(by_bytes, ["never there"])
    for _ in range(200_000):
        decoder.push(97)
    assert len(decoder._tail) < len("never there")
    assert len(decoder.finish()) == 200_000


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 600), max_size=30))
def test_any_ids_stream_to_their_decode(spm: Tokenizer, chatml: Tokenizer, ids: list[int]) -> None:
    for tokenizer in (spm, chatml):
        for skip in (True, False):
            text, _, _ = run(tokenizer, ids, ["never there"], skip_special_tokens=skip)
            assert text == tokenizer.decode(ids, skip_special_tokens=skip)
            text.encode("utf-8")
