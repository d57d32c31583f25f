"""The engine's laws on a device: a row's bytes are its own, whatever else is in the step and however it gets there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from batchinfer.engine import Engine, EngineStats
from batchinfer.testing.gpu.models import random_engine
from batchinfer.testing.gpu.outcome import Check, Clock, Found
from batchinfer.testing.gpu.sizes import LawModel, Sizes
from batchinfer.testing.gpu.timing import free
from batchinfer.types.request import Request, SamplingParams

# By request: its tokens and log-probabilities, those of its prompt.
Result = dict[int, tuple[Any, ...]]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 1},
)


def make_requests(vocab_size: int, longest: int, new_tokens: int, seed: int = 0) -> list[Request]:
    """Prompts of up to `longest` tokens, of which three share the first half; one has a single token."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocab_size) for _ in range(count)]

    shared = tokens(longest // 2)
    prompts = [
        [*shared, *tokens(longest - len(shared))],
        [*shared, *tokens(1)],
        [*shared, *tokens(longest // 4)],
        tokens(1),
        tokens(longest - 1),
    ]
    return [
        Request(
            request_id=i,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=new_tokens, ignore_eos=True, **how),
            stream_key=100 + i,
        )
        for i, (prompt, how) in enumerate(zip(prompts, SETTINGS, strict=True))
    ]


def run(engine: Engine, requests: list[Request], clock: Clock) -> Result:
    """Raises RuntimeError where a row ends with an error."""
    for request in requests:
        engine.add_request(request)
    found: Result = {}
    while engine.has_unfinished():
        clock.check(f"{len(found)} of {len(requests)} rows had ended")
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"row {output.request_id}: {output.error.message}")
            sample = output.outputs[0]
            found[output.request_id] = (sample.token_ids, sample.logprobs, output.prompt_logprobs)
        engine.check()
    return found


@dataclass
class Laws:
    """Of one model. make_engine: with a pool of so many blocks, and options of EngineConfig."""

    make_engine: Callable[..., Engine]
    model: LawModel
    clock: Clock

    def checks(self, name: str) -> Iterator[Check]:
        """Each against all rows together in large steps, with CUDA graphs, without a prefix cache, in a pool that holds
        all of them."""
        chunk = max(5, self.model.longest // 7)
        yield self._check(f"{name}: once more", {})
        replays = "launches of graphs in what it is held against"
        yield self._check(f"{name}: without CUDA graphs", {"cuda_graphs": False}, lambda _: self._together[1], replays)
        yield self._check(f"{name}: each step waited for", {"async_scheduling": False})
        yield self._check(f"{name}: batches of 1", {"max_num_seqs": 1})
        yield self._check(f"{name}: chunks of {chunk} tokens", {"max_num_batched_tokens": chunk})
        cached = {"enable_prefix_caching": True, "max_num_seqs": 2}
        yield self._check(f"{name}: cached prefixes", cached, lambda stats: stats.num_cached_tokens, "cached tokens")
        few = {"num_blocks": self._too_few_blocks(), "max_num_seqs": 3}
        yield self._check(f"{name}: pre-empted", few, lambda stats: stats.num_preemptions, "pre-emptions")

    def _requests(self) -> list[Request]:
        at = self.model
        return make_requests(int(at.config["vocab_size"]), at.longest, at.new_tokens)

    def _too_few_blocks(self) -> int:
        """For the longest row alone, and for two prompts which then grow out of it."""
        size = self.model.block_size
        prompts = [len(request.prompt_token_ids) for request in self._requests()]
        return max(_blocks([self.model.longest + self.model.new_tokens], size), _blocks(prompts[1:3], size))

    def _check(
        self,
        name: str,
        options: Mapping[str, Any],
        happened: Callable[[EngineStats], int] | None = None,
        what: str = "",
    ) -> Check:
        def compare() -> Found:
            expected, _ = self._together
            found, stats, _ = self._run(**options)
            count = None if happened is None else happened(stats)
            if count == 0:
                return Found(passed=False, text=f"no {what}: this run shows nothing")
            with_what = "" if count is None else f", with {count} {what}"
            differing = [i for i in expected if found.get(i) != expected[i]]
            if differing:
                first = differing[0]
                return Found(
                    passed=False,
                    text=f"{len(differing)} of {len(expected)} rows differ{with_what}: {differing}",
                    numbers={"row": first, "found": str(found.get(first)), "expected": str(expected[first])},
                )
            return Found(text=f"{len(expected)} rows, bit for bit{with_what}")

        return Check(name=name, run=compare)

    @cached_property
    def _together(self) -> tuple[Result, int]:
        """(what all others are held against, how often a CUDA graph was launched in it)"""
        found, _, replays = self._run(cuda_graphs=True)
        return found, replays

    def _run(self, num_blocks: int | None = None, **options: Any) -> tuple[Result, EngineStats, int]:
        """(what came out, counts, how often a CUDA graph was launched)"""
        requests, at = self._requests(), self.model
        lengths = [len(request.prompt_token_ids) + at.new_tokens for request in requests]
        settings: dict[str, Any] = {
            "max_model_len": at.longest + at.new_tokens,
            "max_num_seqs": len(requests),
            "max_num_batched_tokens": sum(lengths),
            "enable_prefix_caching": False,
            **options,
        }
        engine = self.make_engine(num_blocks or _blocks(lengths, at.block_size), **settings)
        try:
            found = run(engine, requests, self.clock)
            graphs = getattr(engine.runner, "_graphs", None)
            return found, engine.stats(), 0 if graphs is None else graphs.num_replayed
        finally:
            engine.close()


def checks(sizes: Sizes, device: torch.device, clock: Clock) -> Iterator[Check]:
    """Of all models that sizes name."""
    for name, model in sizes.law_models.items():
        yield from Laws(engines_of(model, sizes.dtype, device), model, clock).checks(name)


def engines_of(model: LawModel, dtype: torch.dtype, device: torch.device) -> Callable[..., Engine]:
    """What makes engines of a model, with the same weights each time."""

    def make_engine(num_blocks: int, **options: Any) -> Engine:
        free(device)
        return random_engine(
            model.config,
            device=device,
            dtype=dtype,
            num_blocks=num_blocks,
            block_size=model.block_size,
            split_size=model.split_size,
            seed=1,
            **options,
        )

    return make_engine


def _blocks(lengths: Sequence[int], size: int) -> int:
    return sum(-(-length // size) for length in lengths)
