"""JSON Lines: good lines, and among them lines and files that are broken in every way that has been seen."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa

from batchinfer.testing.fuzzing.case import INPUT_FOLDER, NASTY_BYTES, NASTY_TEXTS, Case, job_text, mutated

_KEYS = ("text", "id", "more", "tags", "", "a.b", "Text", "error", "messages", "__row__", "\u00e9", "k" * 300)
# A key of an output column is refused for all: the output could not hold both.
_OUTPUT_NAMES = (b'"completion"', b'"error"', b'"source_row"', b'"source_file"', b'"finish_reason"')
_NUMBERS = (
    "0",
    "-0",
    "-0.0",
    "1e400",
    "-1e400",
    "1E-400",
    "NaN",
    "Infinity",
    "-Infinity",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551615",
    "18446744073709551616",
    "1" * 38,
    "1" * 39,
    "9" * 76,
    "9" * 77,
    "7" * 1000,
    "7" * 1001,
    "7" * 5000,
    "0." + "3" * 3000,
    "1e99999999999",
    "01",
    "+1",
    "0x10",
    ".5",
)


def make(rng: Random) -> Case:
    """One file, or two, of at least 16 good lines and up to three hostile ones."""
    notes: list[str] = []
    files: dict[str, bytes] = {}
    rows: dict[str, int] = {}
    completions: dict[str, dict[int, str]] = {}
    carried: dict[str, dict[int, dict[str, str]]] = {}
    refusable = False
    for number in range(1 if rng.random() < 0.85 else 2):
        name, content, good, sure, may_refuse = _file(rng, number, notes)
        files[f"{INPUT_FOLDER}/{name}"] = content
        refusable = refusable or may_refuse
        if sure:
            rows[name], places = good
            completions[name] = {row: f"good row {i} of file {number} é🙂" for row, i in places.items()}
            carried[name] = {row: {"id": str(i)} for row, i in places.items()}
    prompt = rng.choice(({"prompt": "{text}"}, {"prompt_column": "text"}))
    sampling_columns = {"max_tokens": "more"} if rng.random() < 0.1 else {}
    if sampling_columns:
        notes.append("max_tokens from a hostile column")
    job = job_text(input={**prompt, "sampling_columns": sampling_columns})
    # Hostile lines that are no rows make no column.
    if sampling_columns and not any(
        b'"more"' in line for content in files.values() for line in content.splitlines() if b"good row" in line
    ):
        refusable = True
    return Case(
        kind="jsonl",
        what="; ".join(notes),
        job=job,
        files=files,
        rows=rows,
        completions=completions,
        carried=carried,
        # Files must agree about a column's type, and a hostile line may change one file's.
        refusable=refusable or len(files) > 1,
    )


def _file(rng: Random, number: int, notes: list[str]) -> tuple[str, bytes, tuple[int, dict[int, int]], bool, bool]:
    """(name, bytes, (rows, place of each good row), whether these are certain, whether a refusal is right)."""
    lines: list[tuple[bytes, int | None]] = [(_good(rng, i, number), i) for i in range(rng.randint(16, 24))]
    for _ in range(rng.randint(1, 3)):
        maker = rng.choice(_HOSTILE)
        line = maker(rng)
        at = rng.randrange(len(lines) + 1)
        notes.append(f"{maker.__name__.strip('_')} as line {at + 1} of file {number}")
        pieces = line.split(b"\n")
        lines[at:at] = [(piece, None) for piece in pieces]
    first = lines[0][0] if lines else b""
    # The beginning of a file says what kind of file it is; a good one never begins like that.
    refusable = lines[0][1] is None and (b"\0" in first[:4] or first[:1] not in (b"{", b" ", b"", b"\t"))
    refusable = refusable or any(name in line.lower() for line, _ in lines for name in _OUTPUT_NAMES)
    end = rng.choice((b"\n", b"\n", b"\n", b"\r\n"))
    content = end.join(line for line, _ in lines) + (end if rng.random() < 0.8 else b"")
    if rng.random() < 0.1:
        content = b"\xef\xbb\xbf" + content
        notes.append("begins with a byte order mark")
    places: dict[int, int] = {}
    row = 0
    for line, good in lines:
        if not (line + end).strip():
            continue
        if good is not None:
            places[row] = good
        row += 1
    sure = True
    if rng.random() < 0.15:
        content, sure, refusable = mutated(rng, content), False, True
        notes.append("bytes of the file changed")
    name = f"rows-{number}.jsonl"
    match rng.randrange(8):
        case 0:
            content, name = gzip.compress(content, 1), name + ".gz"
        case 1:
            content, name = pa.compress(content, codec="zstd", asbytes=True), name + ".zst"
    if name.endswith(("gz", "zst")) and rng.random() < 0.5:
        content = content[: rng.randrange(len(content))] if rng.random() < 0.5 else mutated(rng, content)
        sure, refusable = False, True
        notes.append("packed, then cut or changed")
    return name, content, (row, places), sure, refusable


def _good(rng: Random, i: int, number: int) -> bytes:
    row: dict[str, Any] = {"id": i, "text": f"good row {i} of file {number} é🙂"}
    if rng.random() < 0.3:
        row["more"] = 64 + i
    return json.dumps(row, ensure_ascii=rng.random() < 0.5).encode()


def _value(rng: Random, depth: int = 0) -> Any:
    """Any JSON value."""
    match rng.randrange(10 if depth < 4 else 7):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice((0, 1, -1, 1 << 40, -(1 << 63), (1 << 64) - 1, 10**37, 10**75, 10**80))
        case 3:
            return rng.choice((0.5, 1e308, -1e-320, float("nan"), float("inf")))
        case 7:
            return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 8 | 9:
            return {rng.choice((*_KEYS, "x", "y")): _value(rng, depth + 1) for _ in range(rng.randrange(4))}
        case _:
            return rng.choice(NASTY_TEXTS)


def _odd_values(rng: Random) -> bytes:
    row = {rng.choice(_KEYS): _value(rng) for _ in range(rng.randint(1, 6))}
    return json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _wrong_type_of_text(rng: Random) -> bytes:
    return json.dumps({"id": 5, "text": _value(rng)}).encode()


def _changed_bytes(rng: Random) -> bytes:
    return mutated(rng, _good(rng, 99, 9))


def _broken_utf8(rng: Random) -> bytes:
    return b'{"id": 1, "text": "a' + rng.choice(NASTY_BYTES[:7]) + b'b"}'


def _broken_utf8_key(rng: Random) -> bytes:
    return b'{"id": 1, "te' + rng.choice(NASTY_BYTES[:7]) + b'xt": "b"}'


def _surrogates(rng: Random) -> bytes:
    half = rng.choice((r"\ud83d", r"\udc80", r"\ud83d\ude00", r"\ude00\ud83d", r"\uD800\u0041", r"\u0000", r"\ufffe"))
    place = rng.choice(('{"id": 1, "text": "x%sy"}', '{"id": 1, "te%sxt": "y"}', '{"id": "%s", "text": "z"}'))
    return (place % half).encode()


def _number(rng: Random) -> bytes:
    number = rng.choice(_NUMBERS)
    place = rng.choice(('{"id": %s, "text": "x"}', '{"id": 1, "text": %s}', '{"more": [%s]}', '{"more": {"n": %s}}'))
    return (place % number).encode()


def _deep(rng: Random) -> bytes:
    depth = rng.choice((10, 46, 47, 48, 49, 60, 500, 990, 5_000, 100_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")))
    inner = rng.choice(("1", "null", '"x"', ""))
    whole = opening * depth + inner + closing * (depth if rng.random() < 0.8 else depth - 1)
    return f'{{"id": 1, "text": "deep", "more": {whole}}}'.encode()


def _double_keys(rng: Random) -> bytes:
    values = [json.dumps(_value(rng)) for _ in range(3)]
    return f'{{"id": 1, "text": "first", "text": "second", "more": {values[0]}, "more": {values[1]}}}'.encode()


def _no_object(rng: Random) -> bytes:
    return rng.choice((b"5", b'"text"', b"null", b"true", b"[]", b'[{"text": "x"}]', b"{}", b"{},", b"text", b"nul"))


def _two_in_one(rng: Random) -> bytes:
    return _good(rng, 97, 9) + rng.choice((b"", b",", b" ", b"\r", b"\x1e", b"\xe2\x80\xa8")) + _good(rng, 98, 9)


def _split_line(rng: Random) -> bytes:
    return b'{"id": 1,\n "text": "in two lines"}'


def _blank(rng: Random) -> bytes:
    return rng.choice((b"", b" ", b"\t\t", b"\r", b"\x0b\x0c", b"\n\n\n", b"\xc2\xa0", b"\xe2\x80\x8b", b"\0"))


def _long(rng: Random) -> bytes:
    size = rng.choice((70_000, 70_000, 300_000, 2_000_000))
    text = rng.choice(("x", "é", "🙂", "\\u0041", " ")) * (size // 4)
    return f'{{"id": 1, "text": "{text}"}}'.encode()


def _many_keys(rng: Random) -> bytes:
    return json.dumps({f"k{i}": i for i in range(rng.choice((50, 50, 400)))}).encode()


def _control_characters(rng: Random) -> bytes:
    return b'{"id": 1, "text": "a' + bytes([rng.choice((0, 1, 7, 8, 9, 13, 27, 31, 127))]) + b'b"}'


def _begins_as_another_file(rng: Random) -> bytes:
    return rng.choice((b"PAR1", b"ARROW1\0\0", b"PK\x03\x04", b"BZh9", b"\x1f\x8b\x08", b"[", b"\xff\xfe{\0"))


def _output_names(rng: Random) -> bytes:
    return json.dumps({"id": 1, "text": "x", rng.choice(("completion", "Error", "source_row")): 1}).encode()


_HOSTILE: tuple[Callable[[Random], bytes], ...] = (
    _odd_values,
    _odd_values,
    _wrong_type_of_text,
    _changed_bytes,
    _changed_bytes,
    _broken_utf8,
    _broken_utf8_key,
    _surrogates,
    _number,
    _number,
    _deep,
    _double_keys,
    _no_object,
    _two_in_one,
    _split_line,
    _blank,
    _long,
    _many_keys,
    _control_characters,
    _begins_as_another_file,
    _output_names,
)
