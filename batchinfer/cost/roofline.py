"""The time that steps take at best, as long as reading their bytes or doing their operations, and a job of such steps.

A bound for each step, and a good guess of proportions: kernels that reach neither rate, the host's work and
communication between devices come on top. Of a job, prompts come first, then decoding: steps that mix the two use both
rates at once, and can take less. (Williams, Waterman, Patterson 2009: "Roofline".)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchinfer.cost.devices import Device
from batchinfer.cost.model import ModelShape

STEP_TOKENS = 8_192  # of a step that only computes prompts
USABLE = 0.9  # of a device's memory, for weights and KV cache
MOST_ROWS = 1 << 24
MOST_DEVICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How weights of the layers are held. bits: of one, without scales; multiplied: as what, of `devices.RATES`;
    group_bits: of the scale (and zero point) of a group of weights, where there are groups, else output_bytes: of the
    scale of each output."""

    bits: float
    multiplied: str
    group_bits: int = 0
    output_bytes: int = 0


WEIGHTS = {
    "float32": Format(bits=32, multiplied="float32"),
    "bfloat16": Format(bits=16, multiplied="bfloat16"),
    "float16": Format(bits=16, multiplied="bfloat16"),
    "int8": Format(bits=8, multiplied="int8", output_bytes=4),
    "fp8": Format(bits=8, multiplied="fp8", group_bits=32, output_bytes=4),
    "int4": Format(bits=4, multiplied="bfloat16", group_bits=16 + 8, output_bytes=2),
    "mxfp4": Format(bits=4.25, multiplied="bfloat16"),  # the format has its scales: one of 8 bits for 32 weights
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """operations are those of products with weights that can be quantized, other_operations all others: of attention,
    the head and what of the layers always stays plain."""

    num_bytes: float
    operations: float
    other_operations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A model in formats, on a device. weights: of WEIGHTS, for the layers; head and embeddings are in 2 bytes, or in 4
    where the layers are float32. group: how many weights share a scale, 0 where all of an output do."""

    shape: ModelShape
    device: Device
    weights: str
    kv_cache_dtype: str
    group: int = 0

    @property
    def _plain_bytes(self) -> int:
        return 4 if self.weights == "float32" else 2

    def _held_bytes(self, weights: float, outputs: float) -> float:
        """Of weights of the layers, those that stay plain among them, and of the scales of so many outputs."""
        held = WEIGHTS[self.weights]
        quantized = weights - self.shape.plain_weights
        grouped = self.group and held.group_bits
        scales = held.group_bits / 8 * quantized / self.group if grouped else held.output_bytes * outputs
        return held.bits / 8 * quantized + scales + self._plain_bytes * self.shape.plain_weights

    def _read_bytes(self, tokens: float) -> float:
        """Of all weights that a step of so many tokens reads; embeddings are a few rows."""
        layers = self._held_bytes(self.shape.touched_weights(tokens), self.shape.touched_outputs(tokens))
        return layers + self._plain_bytes * self.shape.head_weights

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.kv_cache_dtype)

    @property
    def weight_bytes(self) -> float:
        """Of all weights, which lie in the device's memory."""
        shape = self.shape
        plain = shape.head_weights + shape.embedding_weights + shape.norm_weights
        experts = shape.expert_layers * shape.num_experts
        outputs = shape.layer_outputs + experts * shape.expert_outputs
        return self._held_bytes(shape.layer_weights + shape.all_expert_weights, outputs) + self._plain_bytes * plain

    def seconds(self, work: Work) -> float:
        return max(work.num_bytes / self.device.bandwidth, self.busy_s(work))

    def busy_s(self, work: Work) -> float:
        """At the device's rates of operations."""
        plain = self.device.rate("float32" if self.weights == "float32" else "bfloat16")
        return work.operations / self.device.rate(WEIGHTS[self.weights].multiplied) + work.other_operations / plain

    def decode_step(self, batch: float, context: float, shared: float = 0.0) -> Work:
        """A step of `batch` rows that generates one token in each; each sees `context` tokens of its own behind
        `shared` ones that are read once for all."""
        shape = self.shape
        own, seen = shape.seen_tokens(context), shape.seen_tokens(context + shared)
        return Work(
            num_bytes=self._read_bytes(batch) + self.kv_bytes_per_token * (batch * (own + 1) + shared),
            operations=2 * batch * (shape.active_weights - shape.plain_weights),
            other_operations=2 * batch * (shape.plain_weights + shape.head_weights + shape.attention_products * seen),
        )

    def prefill(self, tokens: float, rows: int, shared: float = 0.0) -> Work:
        """Prompts of so many tokens in all, in full steps; a token sees half of a row of the mean length, and `shared`
        tokens before it. The head sees the last token of each row."""
        shape = self.shape
        a_step = self._read_bytes(min(tokens, STEP_TOKENS))
        seen = shape.seen_tokens(shared + tokens / rows / 2)
        return Work(
            num_bytes=math.ceil(tokens / STEP_TOKENS) * a_step + tokens * self.kv_bytes_per_token,
            operations=2 * tokens * (shape.active_weights - shape.plain_weights),
            other_operations=2
            * (rows * shape.head_weights + tokens * (shape.plain_weights + shape.prefill_attention_products * seen)),
        )

    def balanced_batch(self, context: float = 0.0) -> int | None:
        """The fewest rows at which a decode step takes as long for its operations as for its bytes; below that it is
        bound by memory. None where it always is: the KV cache is read for one row alone, the weights for all."""

        def bound_by_memory(batch: int) -> bool:
            work = self.decode_step(batch, context)
            return work.num_bytes / self.device.bandwidth > self.busy_s(work)

        low, high = 0, 1
        while bound_by_memory(high):
            low, high = high, 2 * high
            if high > MOST_ROWS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if bound_by_memory(middle) else (low, middle)
        return high

    def most_rows(self, row_tokens: float) -> int:
        """How many rows of so many tokens the device's memory holds beside the weights."""
        left = USABLE * self.device.memory_bytes - self.weight_bytes
        per_row = self.kv_bytes_per_token * max(row_tokens, 1.0)
        return max(int(min(left / per_row, MOST_ROWS) if per_row else MOST_ROWS), 0) if left > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTokens:
    """prompt_tokens of all `rows`, of which shared_tokens are computed and kept once for several; output_tokens."""

    rows: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """device, num_devices  those that are counted with: as given, or as many as hold the model
    weights, kv_cache_dtype the formats
    weight_bytes            of all devices together, as all below
    row_tokens              of a row, in the mean: what it does not share, and its output
    most_rows               of that length, which fit beside the weights
    balanced_batch          below so many rows decoding is bound by memory (products alone, no KV cache); None: always
    batch                   rows that are decoded together
    step_s, step_bytes, step_operations   of a decode step of `batch` rows, with half of the output behind them
    single_step_s           of a decode step of one row
    bound                   "memory" or "operations": what a decode step of `batch` rows waits for
    decode_tokens_per_s     in such steps
    prefill_s, prefill_bytes, prefill_operations   of all prompts
    decode_s                of all output behind the first tokens
    total_s                 prefill_s + decode_s
    """

    device: str
    num_devices: int
    weights: str
    kv_cache_dtype: str
    weight_bytes: float
    kv_bytes_per_token: int
    row_tokens: float
    most_rows: int
    balanced_batch: int | None
    batch: int
    step_s: float
    step_bytes: float
    step_operations: float
    single_step_s: float
    bound: str
    decode_tokens_per_s: float
    prefill_s: float
    prefill_bytes: float
    prefill_operations: float
    decode_s: float
    total_s: float


def predict(
    shape: ModelShape, device: Device, *, weights: str, kv_cache_dtype: str, job: JobTokens, group: int = 0
) -> Prediction | None:
    """A job of at least one row. One device that is too small is taken two, four, ... times; None where no such number
    up to MOST_DEVICES is enough, or where several were given and are too small."""
    own = job.prompt_tokens - job.shared_tokens
    row_tokens = (own + job.output_tokens) / job.rows
    model = CostModel(shape=shape, device=device, weights=weights, kv_cache_dtype=kv_cache_dtype, group=group)
    count = 1
    while not model.most_rows(row_tokens):
        count *= 2
        if device.count > 1 or count > MOST_DEVICES:
            return None
        model = replace(model, device=device.times(count))
    most_rows = model.most_rows(row_tokens)
    batch = min(job.rows, most_rows)
    context = (own + job.output_tokens / 2) / job.rows
    shared = job.shared_tokens / job.rows
    step, single = model.decode_step(batch, context, shared), model.decode_step(1, context, shared)
    prefill = model.prefill(own, job.rows, shared)
    step_s, prefill_s = model.seconds(step), model.seconds(prefill)
    # The first token of each row comes out of its prefill.
    decode_s = max(job.output_tokens - job.rows, 0) / batch * step_s
    return Prediction(
        device=str(model.device),
        num_devices=model.device.count,
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        row_tokens=row_tokens,
        most_rows=most_rows,
        balanced_batch=model.balanced_batch(),
        batch=batch,
        step_s=step_s,
        step_bytes=step.num_bytes,
        step_operations=step.operations + step.other_operations,
        single_step_s=model.seconds(single),
        bound="operations" if model.busy_s(step) > step.num_bytes / model.device.bandwidth else "memory",
        decode_tokens_per_s=batch / step_s,
        prefill_s=prefill_s,
        prefill_bytes=prefill.num_bytes,
        prefill_operations=prefill.operations + prefill.other_operations,
        decode_s=decode_s,
        total_s=prefill_s + decode_s,
    )
