"""FakeRunner: a model runner without a model, whose next token is a hash of the prefix.

Responsible for: a `ModelRunner` that needs no torch and no weights, for tests, dry runs and measuring everything
around a model. Not for: parsing `fake://` URLs (modelfiles.fake).

Every token's slot of simulated KV memory holds the rolling hash of the prefix that ends there, in every KV group. A
sequence that comes with other blocks than before is checked slot by slot: whatever its blocks hold before its chunk
must be the hashes of its own tokens. Each chunk reads the slot before its start, and the slot at the end of one
earlier block, which goes into the sampled token. So a wrong block table, a block shared before it was computed, a
stale block and a copy from a wrong block raise EngineError, while chunk sizes, batches, pre-emption and cache hits
must not change a token. `expected_output` is the same function without blocks.

Parameters of a `fake://hash?...` or `fake://echo?...` URL (numbers):

    vocab, max_model_len    size of the vocabulary, of the context
    num_blocks              KV blocks; default 4,096, and at least one full context
    eos_rate                how often the next token is EOS, 0 to 1; default 0
    step_delay_ms           sleep in every step
    crash_token             a prompt that holds this id kills the process (exit code 13)
    crash_signal            by this signal instead, for instance 11 (SIGSEGV)
    raise_token             a prompt that holds this id makes every step with it raise RuntimeError
    nan_token               a prompt that holds this id ends with an error for non-finite logits
    max_step_tokens         a step with more tokens raises OutOfMemory

`hash` gives printable ASCII; `echo` gives the prompt's own tokens again, then EOS, so that rows can be told apart.
"""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from batchinfer.errors import ConfigError, EngineError, OutOfMemory
from batchinfer.types.request import SamplingParams, TokenLogprobs
from batchinfer.types.rows import ErrorClass, RowError
from batchinfer.types.step import Chunk, KVGroup, SequenceSpec, StepPlan, StepResult
from batchinfer.types.streams import GOLDEN, mix64

CRASH_EXIT_CODE = 13
DEFAULT_NUM_BLOCKS = 4096

_FACTOR = 0x2545F491
_MASK = (1 << 60) - 1
_START = 0x1234567
_STIR = 0x9E3779B1
_EOS_UNITS = 1 << 20
_FIRST_TOKEN, _NUM_TOKENS = 33, 94  # printable ASCII without the blank

KNOWN_PARAMETERS = frozenset(
    [
        "num_blocks",
        "eos_rate",
        "step_delay_ms",
        "crash_token",
        "crash_signal",
        "raise_token",
        "nan_token",
        "max_step_tokens",
    ]
)
_MODEL_KEYS = frozenset(
    [
        "architectures",
        "model_type",
        "fake_kind",
        "vocab_size",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
    ]
)


class FakeRunner:
    """A ModelRunner. One KV group, unless `kv_groups` says otherwise; every group is written and read.

    `num_steps`, `num_tokens` and `num_copies` count what was executed. Steps must come without a gap, as in any
    runner.
    """

    def __init__(
        self,
        *,
        kind: str = "hash",
        kv_groups: Sequence[KVGroup] = (KVGroup(num_blocks=DEFAULT_NUM_BLOCKS, block_size=16),),
        eos_token_id: int = 257,
        eos_rate: float = 0.0,
        step_delay_ms: float = 0.0,
        crash_token: int | None = None,
        crash_signal: int | None = None,
        raise_token: int | None = None,
        nan_token: int | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        if kind not in ("hash", "echo"):
            raise ConfigError(f"fake://{kind}: no such kind of fake model; there are fake://hash and fake://echo")
        self.kv_groups = tuple(kv_groups)
        self.num_steps = 0
        self.num_tokens = 0
        self.num_copies = 0
        self._echo = kind == "echo"
        self._eos = eos_token_id
        self._eos_below = int(eos_rate * _EOS_UNITS)
        self._delay_s = step_delay_ms / 1000
        self._crash_token, self._raise_token, self._nan_token = crash_token, raise_token, nan_token
        self._crash_signal = crash_signal
        self._has_faults = any(token is not None for token in (crash_token, raise_token, nan_token))
        self._max_step_tokens = max_step_tokens
        self._kv = [array("q", [-1]) * (g.num_blocks * g.block_size) for g in self.kv_groups]
        self._groups = [(i, kv, self.kv_groups[i].block_size) for i, kv in enumerate(self._kv)]
        self._traces: dict[int, _Trace] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, block_size: int = 16) -> FakeRunner:
        """From the config that modelfiles makes of a fake:// URL."""
        options = {key: value for key, value in config.items() if key not in _MODEL_KEYS}
        for key, value in options.items():
            if key not in KNOWN_PARAMETERS:
                raise ConfigError(
                    f"model.path: fake:// knows no parameter {key!r}; there are vocab, max_model_len, "
                    + ", ".join(sorted(KNOWN_PARAMETERS))
                )
            if not isinstance(value, (int, float)):
                raise ConfigError(f"model.path: parameter {key} of fake:// must be a number, got {value!r}")
        enough = -(-int(config["max_position_embeddings"]) // block_size)
        num_blocks = int(options.pop("num_blocks", max(DEFAULT_NUM_BLOCKS, enough)))
        return cls(
            kind=config["fake_kind"],
            kv_groups=(KVGroup(num_blocks=num_blocks, block_size=block_size),),
            eos_token_id=config["eos_token_id"],
            **options,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step != self.num_steps:
            raise EngineError(f"step {plan.step} was planned, but this runner is at step {self.num_steps}")
        traces = self._traces
        for spec in plan.added:
            traces[spec.seq_id] = _Trace(spec, self._is_plain(spec), len(self._kv))
        for seq_id in plan.finished:
            traces.pop(seq_id, None)
        errors: dict[int, RowError] = {}
        if self._has_faults:
            self._fault(plan, errors)
        if self._max_step_tokens is not None:
            num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
            if num_tokens > self._max_step_tokens:
                raise OutOfMemory(f"fake: a step of {num_tokens} tokens, {self._max_step_tokens} fit")
        if self._delay_s:
            time.sleep(self._delay_s)

        if plan.copies:
            self._copy(plan)
        token_ids: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        chunks = plan.chunks
        if errors:
            chunks = tuple(chunk for chunk in chunks if chunk.seq_id not in errors)
        kv, size = self._kv[0], self.kv_groups[0].block_size
        eos, eos_below = self._eos, self._eos_below
        for chunk in chunks:
            seq_id, start, ids, tables, num_logits = chunk
            trace = traces[seq_id]
            if start != trace.plain_at or len(ids) != 1 or not num_logits:
                self._run(chunk, trace, token_ids, logprobs, prompt_logprobs)
                continue
            # What `_run` does, for the chunks that nearly all are: the next token of a plain sequence.
            table, hashes, last_blocks = tables[0], trace.hashes, trace.last_blocks
            before = start - 1
            place = before // size
            block = table[place]
            state = hashes[before]
            if block != last_blocks[0]:
                _check_prefix(seq_id, kv, size, table, hashes, start)
                last_blocks[0] = block
            elif kv[block * size + before % size] != state:
                raise _wrong_slot(seq_id, before, block)
            state = (state * _FACTOR + ids[0]) & _MASK
            hashes.append(state)
            offset = start % size
            if not offset:
                last_blocks[0] = block = table[place + 1]
            kv[block * size + offset] = state
            trace.end = trace.plain_at = end = start + 1
            mixed = state
            if end >= size:
                place = state % (end // size)
                found = kv[table[place] * size + size - 1]
                if found != hashes[place * size + size - 1]:
                    raise _wrong_slot(seq_id, place * size + size - 1, table[place])
                mixed ^= found
            mixed = (mixed ^ (mixed >> 29)) * _STIR
            mixed ^= mixed >> 31
            if eos_below and mixed % _EOS_UNITS < eos_below:
                token_ids[seq_id] = (eos,)
            else:
                token_ids[seq_id] = (_FIRST_TOKEN + (mixed >> 20) % _NUM_TOKENS,)
        self.num_steps += 1
        self.num_tokens += sum([len(chunk.token_ids) for chunk in chunks])
        return StepResult(token_ids, logprobs, prompt_logprobs, errors)

    def _run(
        self,
        chunk: Chunk,
        trace: _Trace,
        token_ids: dict[int, tuple[int, ...]],
        logprobs: dict[int, list[TokenLogprobs]],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> None:
        """Any chunk: checks what it reads, writes its slots, samples. Adds to the results."""
        seq_id, start, ids, tables, num_logits = chunk
        end = start + len(ids)
        spec, hashes, last_blocks = trace.spec, trace.hashes, trace.last_blocks
        if ids == spec.prompt_token_ids[start:end]:
            states = hashes[start:end]
        else:
            states = hashes[start:end] = _roll(hashes[start - 1] if start else _START, ids)
        state = states[-1]
        for group, kv, size in self._groups:
            table = tables[group]
            if start:
                place, offset = divmod(start - 1, size)
                block = table[place]
                if start != trace.end or block != last_blocks[group]:
                    _check_prefix(seq_id, kv, size, table, hashes, start)
                elif kv[block * size + offset] != hashes[start - 1]:
                    raise _wrong_slot(seq_id, start - 1, block)
            last_blocks[group] = table[(end - 1) // size]
            _write(kv, table, size, start, states)
        trace.end = end
        trace.plain_at = end if trace.plain and end == len(hashes) else -1
        sampling = spec.sampling
        if sampling.prompt_logprobs is not None:
            prompt = spec.prompt_token_ids
            prompt_logprobs[seq_id] = [
                _logprob(prompt[p], p, sampling.prompt_logprobs) for p in range(start + 1, min(end + 1, len(prompt)))
            ]
        if num_logits:
            mixed = state
            for group, kv, size in self._groups:
                if end >= size:
                    place = state % (end // size)
                    block = tables[group][place]
                    found = kv[block * size + size - 1]
                    if found != hashes[place * size + size - 1]:
                        raise _wrong_slot(seq_id, place * size + size - 1, block)
                    if group == 0:
                        mixed ^= found
            token = self._sample(spec, mixed, end - len(spec.prompt_token_ids))
            token_ids[seq_id] = (token,)
            if sampling.logprobs is not None:
                logprobs[seq_id] = [_logprob(token, mixed, sampling.logprobs)]

    def close(self) -> None:
        self._traces.clear()

    def _is_plain(self, spec: SequenceSpec) -> bool:
        """Whether a sequence's next token is the hash and nothing else, out of one group."""
        sampling = spec.sampling
        return (
            len(self._kv) == 1
            and sampling.greedy
            and not sampling.min_tokens
            and sampling.logprobs is None
            and sampling.prompt_logprobs is None
            and not self._echo
        )

    def _sample(self, spec: SequenceSpec, mixed: int, position: int) -> int:
        sampling = spec.sampling
        if self._echo:
            prompt = spec.prompt_token_ids
            return prompt[position] if position < len(prompt) else self._eos
        mixed = (mixed ^ (mixed >> 29)) * _STIR
        if sampling.temperature and sampling.top_k != 1:
            mixed ^= mix64(spec.sample_key + (position + 1) * GOLDEN)
        mixed ^= mixed >> 31
        masked = position < sampling.min_tokens
        if mixed % _EOS_UNITS < self._eos_below and not (masked and self._eos in spec.stop_token_ids):
            return self._eos
        choice = mixed >> 20
        if masked:
            for after in range(_NUM_TOKENS):
                if _FIRST_TOKEN + (choice + after) % _NUM_TOKENS not in spec.stop_token_ids:
                    return _FIRST_TOKEN + (choice + after) % _NUM_TOKENS
            return next(token for token in range(len(spec.stop_token_ids) + 1) if token not in spec.stop_token_ids)
        return _FIRST_TOKEN + choice % _NUM_TOKENS

    def _copy(self, plan: StepPlan) -> None:
        sources = {(copy.group, copy.source) for copy in plan.copies}
        destinations = {(copy.group, copy.destination) for copy in plan.copies}
        if sources & destinations or len(destinations) < len(plan.copies):
            raise EngineError(f"step {plan.step}: copies of blocks depend on their order: {plan.copies}")
        for copy in plan.copies:
            kv, size = self._kv[copy.group], self.kv_groups[copy.group].block_size
            first, to = copy.source * size, copy.destination * size
            kv[to : to + size] = kv[first : first + size]
        self.num_copies += len(plan.copies)

    def _fault(self, plan: StepPlan, errors: dict[int, RowError]) -> None:
        for chunk in plan.chunks:
            prompt = self._traces[chunk.seq_id].spec.prompt_token_ids
            if self._crash_token is not None and self._crash_token in prompt:
                if self._crash_signal is not None:
                    signal.raise_signal(self._crash_signal)
                os._exit(CRASH_EXIT_CODE)
            if self._raise_token is not None and self._raise_token in prompt:
                raise RuntimeError(f"fake: token {self._raise_token} was in a prompt")
            if self._nan_token is not None and self._nan_token in prompt:
                errors[chunk.seq_id] = RowError(
                    ErrorClass.NON_FINITE_LOGITS, f"fake: token {self._nan_token} was in the prompt"
                )


class _Trace:
    """What a sequence's slots must hold. hashes[p] is the rolling hash of tokens 0 .. p, for all that its spec tells
    and what else has run; `end` where its last chunk ended, `last_blocks` in which block that was, by group. `plain`
    see `FakeRunner._is_plain`; `plain_at` is where its next chunk begins, if that is plain too and has never run."""

    __slots__ = ("end", "hashes", "last_blocks", "plain", "plain_at", "spec")

    def __init__(self, spec: SequenceSpec, plain: bool, num_groups: int) -> None:
        self.spec = spec
        self.plain = plain
        self.plain_at = -1
        self.hashes = _roll(_START, [*spec.prompt_token_ids, *spec.output_token_ids])
        self.end = 0
        self.last_blocks = [-1] * num_groups


def _roll(state: int, tokens: Sequence[int]) -> array[int]:
    """The rolling hash after each of the tokens, from that before them."""
    return array("q", [state := (state * _FACTOR + token) & _MASK for token in tokens])


def expected_output(
    runner: FakeRunner, prompt: Sequence[int], sampling: SamplingParams, sample_key: int, num_tokens: int
) -> list[int]:
    """The tokens that a runner like this one (of one KV group) must give, worked out without blocks or batches:
    `num_tokens` of them, or up to and including EOS."""
    spec = SequenceSpec(seq_id=0, prompt_token_ids=prompt, sampling=sampling, sample_key=sample_key)
    size = runner.kv_groups[0].block_size
    states = array("q")
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        states += _roll(states[-1] if states else _START, tokens[len(states) :])
        state = states[-1]
        earlier = len(tokens) // size
        mixed = state ^ states[state % earlier * size + size - 1] if earlier else state
        tokens.append(runner._sample(spec, mixed, len(tokens) - len(prompt)))
        if tokens[-1] == runner._eos:
            break
    return tokens[len(prompt) :]


def _check_prefix(seq_id: int, kv: array[int], size: int, table: Sequence[int], hashes: array[int], stop: int) -> None:
    for start in range(0, stop, size):
        end = min(start + size, stop)
        first = table[start // size] * size
        if kv[first : first + end - start] != hashes[start:end]:
            wrong = next(p for p in range(start, end) if kv[first + p - start] != hashes[p])
            raise _wrong_slot(seq_id, wrong, table[start // size])


def _wrong_slot(seq_id: int, position: int, block: int) -> EngineError:
    return EngineError(
        f"fake: sequence {seq_id} attends to other tokens than its own at position {position}, in block {block}"
    )


def _write(kv: array[int], table: Sequence[int], size: int, start: int, states: array[int]) -> None:
    done, total = 0, len(states)
    while done < total:
        offset = (start + done) % size
        count = min(size - offset, total - done)
        slot = table[(start + done) // size] * size + offset
        kv[slot : slot + count] = states[done : done + count]
        done += count


def _logprob(token: int, salt: int, count: int) -> TokenLogprobs:
    """A made-up value that depends on nothing but the prefix."""
    value = -0.001 * (salt % 1000)
    top = tuple((token + i, value - i) for i in range(count))
    return TokenLogprobs(token, value, 1, top)
