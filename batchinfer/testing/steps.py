"""An engine held in steps of one kind, for measuring: all decoding, all prefilling, or both.

Prompts are random tokens from a fixed seed. Every sequence is greedy and goes on whatever it generates.
"""

from __future__ import annotations

import random
from typing import Literal

from batchinfer.engine import Engine
from batchinfer.errors import ConfigError
from batchinfer.types.request import Request, SamplingParams

Shape = Literal["decode", "prefill", "mixed"]
SHAPES: tuple[Shape, ...] = ("decode", "prefill", "mixed")


class SteadySteps:
    """decode: num_seqs sequences behind contexts of about `context` tokens (a quarter more or less), a token each.
    prefill: prompts of that length, one after the other. mixed: half as many decoding, prompts in the rest of the step.

    The first `shared` tokens of all prompts are the same.
    """

    def __init__(self, engine: Engine, shape: Shape, *, num_seqs: int, context: int, shared: int = 0) -> None:
        if context * 5 // 4 >= engine.max_model_len:
            raise ConfigError(f"contexts of {context} tokens need more than max_model_len {engine.max_model_len}")
        self.engine = engine
        self._draw = random.Random(0)
        self._context, self._shared = context, self._tokens(shared)
        self._next_id = 0
        self._ids: set[int] = set()
        self._prefilling = shape != "decode"
        num_decoding = {"decode": num_seqs, "prefill": 0, "mixed": max(1, num_seqs // 2)}[shape]
        for _ in range(num_decoding):
            self._add(None)
        before = -1
        while num_decoding and before < num_decoding:  # until a step decodes all of them
            generated = engine.scheduler.num_generated_tokens
            self._step()
            before = engine.scheduler.num_generated_tokens - generated
        self._feed()

    def run(self, count: int) -> None:
        """Raises ConfigError where a decoding sequence reaches the end of the context."""
        for _ in range(count):
            self._feed()
            self._step()

    def close(self) -> None:
        for request_id in self._ids:
            self.engine.abort(request_id)

    def _step(self) -> None:
        for output in self.engine.step():
            if output.request_id in self._ids and not self._prefilling:
                raise ConfigError("a sequence reached the end of the context: use fewer steps or a shorter context")
            self._ids.discard(output.request_id)

    def _feed(self) -> None:
        while self._prefilling and self.engine.scheduler.num_waiting < 4:
            self._add(1)

    def _add(self, max_tokens: int | None) -> None:
        length = self._draw.randint(self._context * 3 // 4, self._context * 5 // 4)
        prompt = (self._shared + self._tokens(length))[: max(1, length, len(self._shared) + 1)]
        self.engine.add_request(
            Request(
                request_id=self._next_id,
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                stream_key=self._next_id,
            )
        )
        self._ids.add(self._next_id)
        self._next_id += 1

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self.engine.vocab_size) for _ in range(count)]
