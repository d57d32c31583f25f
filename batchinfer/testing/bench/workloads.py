"""Prompts to measure with, and how many of their tokens can be shared.

A workload is a Parquet file with the columns id and prompt. Where no folder of them is given, three are made from the
repository's own data, in the shapes that offline jobs have: one long prefix before every row, several questions about
each document, short chats.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from batchinfer.errors import ConfigError

SYSTEM = "You are a helpful assistant. Answer in plain words, and no longer than needed."
QUESTIONS = (
    "Which of these functions change what they are given?",
    "List those that read from a file or a stream.",
    "Which one would a beginner use first, and why?",
    "Write one sentence that says what all of them have in common.",
)
NUM_SHOTS = 24


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: tuple[str, ...]

    def first(self, rows: int | None) -> Workload:
        return self if rows is None else replace(self, prompts=self.prompts[:rows])


@dataclass(frozen=True, slots=True)
class Sharing:
    """prompt_tokens of all rows, and how many of them are the start of another row's prompt, token by token."""

    prompt_tokens: int
    shareable_tokens: int


def read_workloads(folder: Path, names: Sequence[str] = ()) -> list[Workload]:
    """Every Parquet file of a folder, or those named. Raises ConfigError where one is missing or has no prompts."""
    import pyarrow.parquet as pq

    found = {path.stem: path for path in sorted(folder.glob("*.parquet"))}
    workloads = []
    for name in names or found:
        if name not in found:
            raise ConfigError(f"{folder} has no workload {name!r}; there are: {', '.join(found) or 'none'}")
        if "prompt" not in pq.read_schema(found[name]).names:
            raise ConfigError(f"{found[name]} has no column 'prompt'")
        prompts = pq.read_table(found[name], columns=["prompt"])["prompt"].to_pylist()
        workloads.append(Workload(name, tuple(prompts)))
    if not workloads:
        raise ConfigError(f"{folder} has no Parquet files")
    return workloads


def make_workloads(functions: Sequence[Mapping[str, str]]) -> list[Workload]:
    """Three workloads from rows with module, signature and doc (`jobs/data/python-functions.parquet`)."""
    lines = [f"{row['module']}.{row['signature']}: {row['doc']}" for row in functions]
    shots = "".join(
        f"Function: {row['module']}.{row['signature']}\nDescription: {row['doc']}\n\n" for row in functions[:NUM_SHOTS]
    )
    fewshot = [f"{shots}Function: {row['module']}.{row['signature']}\nDescription:" for row in functions[NUM_SHOTS:]]
    documents = ["\n".join(lines[start : start + 2 + start % 11]) for start in range(0, len(lines), 2)]
    questions = [
        _chat(f"Here are functions of Python's library.\n\n{document}\n\n{question}")
        for document in documents
        for question in QUESTIONS
    ]
    random.Random(0).shuffle(questions)
    chats = [_chat(f"Write a short example that uses this Python function.\n\n{line}") for line in lines]
    return [
        Workload("fewshot", tuple(fewshot)),
        Workload("documents", tuple(questions)),
        Workload("chats", tuple(chats)),
    ]


def _chat(user: str) -> str:
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def sharing(prompts: Sequence[list[int]]) -> Sharing:
    """What a perfect prefix cache would save: all prompt tokens less the nodes of their prefix tree."""
    shareable = 0
    before: list[int] = []
    for tokens in sorted(prompts):
        shareable += _common(before, tokens)
        before = tokens
    return Sharing(sum(map(len, prompts)), shareable)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def tokens_of(prompts: Sequence[str], model: str) -> list[list[int]]:
    """Token ids of prompts as a job with `prompt_column` and `LLM.generate` make them."""
    from batchinfer.modelfiles import open_model
    from batchinfer.text import PromptRenderer, PromptSpec, load_tokenizer, prepare_rows
    from batchinfer.types.rows import RowError

    tokenizer = load_tokenizer(open_model(model).tokenizer)
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer")
    renderer = PromptRenderer(PromptSpec(prompt_column="prompt"), tokenizer)
    ids = []
    for row in prepare_rows(renderer, tokenizer, [{"prompt": prompt} for prompt in prompts]):
        if isinstance(row, RowError):
            raise ConfigError(f"a prompt can't be tokenized: {row.message}")
        ids.append(list(row.token_ids))
    return ids
