"""Benches of whole steps and of whole runs: the engine over a model of real shape with random weights.

Times are the clock's, from one step's call to another's end: what the host does counts.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch

from batchinfer.cost import ModelShape
from batchinfer.engine import Engine
from batchinfer.runner.local import LocalRunner
from batchinfer.testing.gpu.models import name_of, random_engine, shape_of
from batchinfer.testing.gpu.outcome import Check, Clock, Found, NothingToCompare
from batchinfer.testing.gpu.sizes import Sizes
from batchinfer.testing.gpu.timing import Rates, Timer, free, measure_rates, synchronize
from batchinfer.types.request import Request, SamplingParams

WARM_STEPS = 4
# Tokens that sequences may decode before the last of them does, and the warm steps.
ROOM = 64
OFFLINE = "offline throughput"  # the line that others are held against


@dataclass
class EngineBenches:
    """Of one model, `sizes.model` or another one's config. given: values of lines that came before, by name.
    deterministic: of the engine."""

    sizes: Sizes
    device: torch.device
    clock: Clock
    given: Mapping[str, float] = field(default_factory=dict)
    deterministic: bool = True
    other_model: Mapping[str, Any] | None = None

    def checks(self) -> Iterator[Check]:
        decode, prefill = self.step_checks()
        yield replace(decode, target=0.8)
        yield replace(prefill, target=0.6)
        yield Check(name=OFFLINE, run=self._offline)

    def step_checks(self) -> list[Check]:
        at = self.sizes
        return [
            Check(name=f"decode, {at.decode_seqs} sequences at {at.decode_context}", run=self._decode),
            Check(name=f"prefill, {at.prefill_seqs} x {at.prefill_tokens} tokens", run=self._prefill),
        ]

    def loose_checks(self) -> Iterator[Check]:
        """Of an engine that need not be deterministic."""
        yield Check(name="what deterministic costs", run=self._cost, target=0.2, at_most=True)

    def peer_checks(self) -> Iterator[Check]:
        yield Check(name="offline throughput against transformers", run=self._against_transformers, target=3.0)

    @cached_property
    def engine(self) -> Engine:
        at = self.sizes
        offline = 0 if self.other_model is not None else at.offline_in + at.offline_out
        decoding = at.decode_context + at.decode_steps + ROOM
        longest = max(decoding, offline, at.prefill_tokens + 1)
        tokens = at.decode_seqs * max(decoding, offline)
        blocks = -(-max(tokens, at.prefill_seqs * at.prefill_tokens) // at.block_size) + 2 * at.decode_seqs
        return random_engine(
            self.model,
            device=self.device,
            dtype=at.dtype,
            num_blocks=blocks,
            block_size=at.block_size,
            split_size=at.split_size,
            deterministic=self.deterministic,
            max_model_len=longest,
            max_num_seqs=max(at.decode_seqs, at.prefill_seqs),
            max_num_batched_tokens=at.prefill_seqs * at.prefill_tokens,
            enable_prefix_caching=False,
        )

    def close(self) -> None:
        """Gives the device's memory back."""
        engine = self.__dict__.pop("engine", None)
        if engine is not None:
            engine.close()
            free(self.device)

    @property
    def model(self) -> Mapping[str, Any]:
        return self.sizes.model if self.other_model is None else self.other_model

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.model)

    @cached_property
    def rates(self) -> Rates:
        at = self.sizes
        return measure_rates(Timer(device=self.device, runs=at.runs, warm=at.warm), at)

    # ---------------------------------------------------------------- steps

    def _decode(self) -> Found:
        at, engine = self.sizes, self.engine
        length = max(1, at.decode_context - at.decode_steps // 2 - WARM_STEPS)
        ids = self._add([length] * at.decode_seqs, at.decode_steps + ROOM)
        try:
            generated = -1
            while generated < at.decode_seqs:  # until a step decodes all of them
                self.clock.check("prompts were run")
                before = engine.scheduler.num_generated_tokens
                engine.step()
                generated = engine.scheduler.num_generated_tokens - before
            self._steps(WARM_STEPS)
            lengths = [length + len(engine.partial_outputs(i)[0].token_ids) for i in ids]
            times = self._steps(at.decode_steps)
        finally:
            for i in ids:
                engine.abort(i)
        steps = at.decode_steps
        kv_tokens = steps * sum(lengths) + len(lengths) * steps * (steps - 1) // 2
        kv_bytes = kv_tokens * self.shape.kv_bytes_per_token(name_of(at.dtype)) / steps
        weight_bytes = self._weight_bytes(len(ids))
        floor = self.rates.floor_s(weight_bytes + kv_bytes)
        # Not the mean: a shape of step that is new runs without a graph, then is captured; all others gain by it.
        step = median(times)
        return Found(
            value=floor / step,
            unit="of the floor",
            text=f"{1e3 * step:.2f} ms a step, at best {1e3 * floor:.2f} ms; {len(ids) / step:.0f} tokens/s; "
            f"mean {1e3 * sum(times) / steps:.2f} ms",
            numbers={
                "step_s": step,
                "times_s": times,
                "weight_bytes": weight_bytes,
                "kv_bytes": kv_bytes,
                "context": kv_tokens / steps / len(lengths),
                "copy_bytes_s": self.rates.copy_bytes_s,
                "graphs": self._graphs(),
                "facts": {name: value for name, (value, _) in engine.facts.items()},
            },
        )

    def _prefill(self) -> Found:
        at, engine = self.sizes, self.engine
        times: list[float] = []
        steps = 0
        for _ in range(at.prefill_steps + 1):
            self.clock.check(f"{len(times)} of {at.prefill_steps} steps were timed")
            self._add([at.prefill_tokens] * at.prefill_seqs, 1)
            synchronize(self.device)
            start = time.perf_counter()
            while engine.has_unfinished():
                steps += 1
                engine.step()
            synchronize(self.device)
            times.append(time.perf_counter() - start)
        taken = sorted(times[1:])[at.prefill_steps // 2]
        operations = self._prompt_operations(at.prefill_seqs, at.prefill_tokens)
        rate = operations / taken
        return Found(
            value=rate / self.rates.product_ops_s,
            unit="of the matrix rate",
            text=f"{1e3 * taken:.1f} ms, {rate / 1e12:.0f} TFLOP/s; "
            f"{at.prefill_seqs * at.prefill_tokens / taken:.0f} tokens/s",
            numbers={"taken_s": taken, "operations": operations, "steps": steps, "times_s": times},
        )

    def _steps(self, count: int) -> list[float]:
        """Seconds of each: each call waits for the tokens of one step, the one before the last that was launched."""
        times = []
        synchronize(self.device)
        for _ in range(count):
            start = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - start)
        return times

    # ---------------------------------------------------------------- runs

    def _offline(self) -> Found:
        rate, numbers = self._rate()
        at = self.sizes
        text = f"{at.offline_rows} rows, {at.offline_in} tokens in, {at.offline_out} out; {numbers['taken_s']:.1f} s"
        return Found(value=rate, unit="tokens/s", text=text, numbers=numbers)

    def _cost(self) -> Found:
        ours = self._ours()
        rate, numbers = self._rate()
        return Found(
            value=rate / ours - 1,
            text=f"of the time of an offline run; {ours:.0f} tokens/s, without {rate:.0f}",
            numbers=numbers,
        )

    def _against_transformers(self) -> Found:
        if importlib.util.find_spec("transformers") is None:
            raise NothingToCompare("no peer installed: transformers is not there")
        ours = self._ours()
        at = self.sizes
        prompts = [self._tokens(seed, at.offline_in) for seed in range(at.offline_rows)]
        rate = transformers_rate(self.model, at.dtype, self.device, prompts, at.offline_out)
        # It takes them where they are; without, it is much slower.
        has_flash = any(map(importlib.util.find_spec, ("flash_attn_interface", "flash_attn", "kernels")))
        kind = "with" if has_flash else "WITHOUT"
        text = f"{ours:.0f} tokens/s, transformers' continuous batching {kind} flash attention {rate:.0f}"
        return Found(value=ours / rate, unit="x", text=text, numbers={"transformers": rate})

    def _ours(self) -> float:
        if OFFLINE not in self.given:
            raise RuntimeError(f"{OFFLINE} has no result to be held against")
        return self.given[OFFLINE]

    def _rate(self) -> tuple[float, dict[str, Any]]:
        """(tokens generated a second, numbers), of all rows, once every kernel is compiled."""
        at = self.sizes
        for rows in (8, 100, at.decode_seqs):
            self._run(min(rows, at.offline_rows), min(64, at.offline_in), min(4, at.offline_out))
        before = self.engine.stats()
        taken = self._run(at.offline_rows, at.offline_in, at.offline_out)
        after = self.engine.stats()
        host_s = after.scheduler_s - before.scheduler_s + after.output_s - before.output_s
        numbers = {
            "taken_s": taken,
            "steps": after.num_steps - before.num_steps,
            "overlapped_steps": after.num_overlapped_steps - before.num_overlapped_steps,
            "scheduler_and_output_s": host_s,
            "launching_s": after.runner_s - after.waiting_s - before.runner_s + before.waiting_s,
        }
        return at.offline_rows * at.offline_out / taken, numbers

    def _run(self, rows: int, num_in: int, num_out: int) -> float:
        """Seconds."""
        engine, ended = self.engine, 0
        ids = self._add([num_in] * rows, num_out)
        start = time.perf_counter()
        try:
            while engine.has_unfinished():
                self.clock.check(f"{ended} of {rows} rows had ended")
                for output in engine.step():
                    if output.error is not None:
                        raise RuntimeError(output.error.message)
                    ended += 1
        finally:
            for i in ids:
                engine.abort(i)
        return time.perf_counter() - start

    # ---------------------------------------------------------------- requests, and what they cost

    def _add(self, lengths: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy requests with random prompts; their ids."""
        first = self.engine.stats().num_requests
        ids = list(range(first, first + len(lengths)))
        for i, length in zip(ids, lengths, strict=True):
            self.engine.add_request(
                Request(
                    request_id=i,
                    prompt_token_ids=self._tokens(i, length),
                    sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                    stream_key=i,
                )
            )
        return ids

    def _tokens(self, seed: int, count: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(3, int(self.model["vocab_size"])) for _ in range(count)]

    def _graphs(self) -> dict[str, int] | None:
        """What was done with CUDA graphs so far; None without."""
        runner = self.engine.runner
        assert isinstance(runner, LocalRunner)
        graphs = runner._graphs
        return None if graphs is None else {"captured": graphs.num_captured, "replayed": graphs.num_replayed}

    def _weight_bytes(self, rows: int) -> float:
        """That a step of so many rows reads: of an embedding that is no head, a row for each token is nothing; of
        experts, those that rows choose by chance."""
        at = self.shape
        return (at.touched_weights(rows) + at.head_weights + at.norm_weights) * self.sizes.dtype.itemsize

    def _prompt_operations(self, seqs: int, tokens: int) -> float:
        """Of matrix units: a multiplication and an addition are two; attention to what is seen only; the head once for
        each prompt."""
        at = self.shape
        pairs = tokens * (tokens + 1) / 2
        return 2.0 * seqs * (tokens * at.active_weights + pairs * at.prefill_attention_products + at.head_weights)


def model_checks(sizes: Sizes, device: torch.device, clock: Clock) -> Iterator[Check]:
    """Steps of the models with experts, and with latent attention; a device need not hold two of them."""
    open_ones: list[EngineBenches] = []

    def alone(benches: EngineBenches, run: Callable[[], Found]) -> Found:
        for other in open_ones:
            if other is not benches:
                other.close()
        open_ones[:] = [benches]
        return run()

    for config in (sizes.sparse_model, sizes.latent_model):
        benches = EngineBenches(sizes, device, clock, other_model=config)
        count = int(config["num_hidden_layers"])
        name = f"{config['model_type']}, " + ("one layer" if count == 1 else f"{count} layers")
        for check in benches.step_checks():
            yield replace(check, name=f"{name}: {check.name}", run=partial(alone, benches, check.run))


def transformers_rate(
    config: Mapping[str, Any], dtype: torch.dtype, device: torch.device, prompts: list[list[int]], max_tokens: int
) -> float:
    """Tokens a second that transformers' continuous batching generates, once its own kernels are ready. The model has
    random weights, and no token ends a row."""
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=dtype).eval()

    def generate(rows: list[list[int]], tokens: int) -> tuple[int, float]:
        """(tokens, seconds from the first row's coming to the last one's end)"""
        settings = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch(inputs=rows, generation_config=settings, progress_bar=False).values()
        taken = max(output.lifespan[1] for output in outputs) - min(output.created_time for output in outputs)
        return sum(len(output.generated_tokens) for output in outputs), taken

    generate(prompts[:2], min(4, max_tokens))
    generated, taken = generate(prompts, max_tokens)
    if generated != len(prompts) * max_tokens:
        raise RuntimeError(f"transformers generated {generated} tokens, not {len(prompts) * max_tokens}")
    return generated / taken
