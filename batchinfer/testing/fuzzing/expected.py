"""What rows of chats must be completed with: each conversation rendered alone, by a template of its own."""

from __future__ import annotations

import json

from batchinfer.job.context import open_context
from batchinfer.job.manifest import ResolvedJob
from batchinfer.testing.fuzzing.case import INPUT_FOLDER, Case
from batchinfer.text.chat_template import ChatTemplate
from batchinfer.text.fields import InvalidPrompt
from batchinfer.text.messages import checked_messages
from batchinfer.types.rows import RowError

CHATS, SLOW = "rows-chats.jsonl", "rows-slow.jsonl"


def expected_chats(case: Case, job: ResolvedJob) -> dict[tuple[str, int], str | None]:
    """(file, row) -> completion, None where there can be none. Only for jobs whose model is `fake://echo` with its own
    tokenizer of bytes: there a completion is the prompt. Prompts beyond half the context are left out."""
    content = case.files.get(f"{INPUT_FOLDER}/{CHATS}")
    source = job.spec.input.chat_template
    if case.kind != "template" or content is None or source is None or job.spec.model.tokenizer is not None:
        return {}
    special = open_context(job).tokenizer.named
    found: dict[tuple[str, int], str | None] = {}
    for row, line in enumerate(content.splitlines()):
        template = ChatTemplate(source, special_tokens=special, now=job.semantic["input.now"])
        try:
            messages = checked_messages(json.loads(line).get("messages"), "messages", takes_parts=template.takes_parts)
        except (InvalidPrompt, ValueError):
            continue
        if any(message.keys() - {"role", "content"} for message in messages):
            continue  # empty structs and the like become null in a column
        size = sum(len(message["content"]) for message in messages if isinstance(message["content"], str))
        text = template.render(messages, input_chars=size)
        if isinstance(text, RowError):
            if text.error_class != "template_timeout":  # by the clock, which is not the same twice
                found[CHATS, row] = None
        elif 0 < len(text.encode("utf-8", "replace")) < job.max_model_len // 2 and text.isprintable():
            found[CHATS, row] = text
    return found
