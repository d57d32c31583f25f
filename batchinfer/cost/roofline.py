"""The time that steps take at best, as long as reading their bytes or doing their operations, and a job of such steps.

A bound for each step, and a good guess of proportions: kernels that reach neither rate, the host's work and
communication between devices come on top. Of a job, prompts come first, then decoding: steps that mix the two use both
rates at once, and can take less. (Williams, Waterman, Patterson 2009: "Roofline".)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchinfer.cost.devices import Device
from batchinfer.cost.model import ModelShape

STEP_TOKENS = 8_192  # of a step that only computes prompts
USABLE = 0.9  # of a device's memory, for weights and KV cache
MOST_ROWS = 1 << 24
MOST_DEVICES = 64
# What a weight of the layers takes, bits, and what it is multiplied as. Scales of groups are left out where the format
# does not fix them.
WEIGHTS = {
    "float32": (32, "float32"),
    "bfloat16": (16, "bfloat16"),
    "float16": (16, "bfloat16"),
    "int8": (8, "int8"),
    "fp8": (8, "fp8"),
    "int4": (4, "bfloat16"),
    "mxfp4": (4.25, "bfloat16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """operations are those of layers' products, other_operations those of attention and head."""

    num_bytes: float
    operations: float
    other_operations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A model in formats, on a device. weights: of WEIGHTS, for the layers; head and embeddings are in 2 bytes, or in 4
    where the layers are float32."""

    shape: ModelShape
    device: Device
    weights: str
    kv_cache_dtype: str

    @property
    def _plain_bytes(self) -> int:
        return 4 if self.weights == "float32" else 2

    @property
    def _weight_bytes(self) -> float:
        return WEIGHTS[self.weights][0] / 8

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.kv_cache_dtype)

    @property
    def weight_bytes(self) -> float:
        """Of all weights, which lie in the device's memory."""
        shape = self.shape
        plain = shape.head_weights + shape.embedding_weights + shape.norm_weights
        return self._weight_bytes * (shape.layer_weights + shape.all_expert_weights) + self._plain_bytes * plain

    def seconds(self, work: Work) -> float:
        return max(work.num_bytes / self.device.bandwidth, self.busy_s(work))

    def busy_s(self, work: Work) -> float:
        """At the device's rates of operations."""
        plain = self.device.rate("float32" if self.weights == "float32" else "bfloat16")
        return work.operations / self.device.rate(WEIGHTS[self.weights][1]) + work.other_operations / plain

    def decode_step(self, batch: float, context: float, shared: float = 0.0) -> Work:
        """A step of `batch` rows that generates one token in each; each sees `context` tokens of its own behind
        `shared` ones that are read once for all."""
        shape = self.shape
        own, seen = shape.seen_tokens(context), shape.seen_tokens(context + shared)
        read = self._weight_bytes * shape.touched_weights(batch) + self._plain_bytes * shape.head_weights
        return Work(
            num_bytes=read + self.kv_bytes_per_token * (batch * (own + 1) + shared),
            operations=2 * batch * shape.active_weights,
            other_operations=2 * batch * (shape.head_weights + shape.attention_products * seen),
        )

    def prefill(self, tokens: float, rows: int, shared: float = 0.0) -> Work:
        """Prompts of so many tokens in all, in full steps; a token sees half of a row of the mean length, and `shared`
        tokens before it. The head sees the last token of each row."""
        shape = self.shape
        a_step = self._weight_bytes * shape.touched_weights(min(tokens, STEP_TOKENS))
        a_step += self._plain_bytes * shape.head_weights
        seen = shape.seen_tokens(shared + tokens / rows / 2)
        return Work(
            num_bytes=math.ceil(tokens / STEP_TOKENS) * a_step + tokens * self.kv_bytes_per_token,
            operations=2 * tokens * shape.active_weights,
            other_operations=2 * (rows * shape.head_weights + tokens * shape.prefill_attention_products * seen),
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
    shape: ModelShape, device: Device, *, weights: str, kv_cache_dtype: str, job: JobTokens
) -> Prediction | None:
    """A job of at least one row. One device that is too small is taken two, four, ... times; None where no such number
    up to MOST_DEVICES is enough, or where several were given and are too small."""
    own = job.prompt_tokens - job.shared_tokens
    row_tokens = (own + job.output_tokens) / job.rows
    model = CostModel(shape=shape, device=device, weights=weights, kv_cache_dtype=kv_cache_dtype)
    count = 1
    while not model.most_rows(row_tokens):
        count *= 2
        if device.count > 1 or count > MOST_DEVICES:
            return None
        model = CostModel(shape=shape, device=device.times(count), weights=weights, kv_cache_dtype=kv_cache_dtype)
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
