"""Where an engine's step spends its time: timers around the scheduler, the runner, every layer and every kernel.

Responsible for: putting the timers in place and taking them out again, adding up each part's own time. Nothing of the
engine is changed for it: the timers go around what is there (the functions of the kernel table, the methods of layers),
whatever that is, so that a new backend or scheme is seen too. Layers that run in one call run part by part meanwhile,
which gives the same and takes longer. Not for: making steps to measure (`steps`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from batchinfer_kernels.table import Ops
from torch import nn

from batchinfer.engine import Engine
from batchinfer.layers.embedding import Embedding, LMHead
from batchinfer.layers.linear import Linear
from batchinfer.layers.norm import RMSNorm

SCHEDULING, TENSORS, PRODUCTS, ATTENTION = "scheduling", "tensors and plans", "products", "attention"
NORMS, ROPE, ACTIVATION, EMBEDDING = "norms and quantization", "rope and KV write", "activation", "embedding"
HEAD, SAMPLING, OUTPUTS, REST = "head", "sampling", "outputs", "rest"
# What a kernel is for, by a word in its name. One that says nothing belongs to the layer that calls it.
_BY_NAME = {
    "argmax": HEAD,
    "norm": NORMS,
    "quantize": NORMS,
    "rope": ROPE,
    "kv": ROPE,
    "silu": ACTIVATION,
    "embedding": EMBEDDING,
}
_LOADING = {"parts", "target", "loaded"}


@dataclass(slots=True)
class Part:
    """One timed thing. own_s leaves out the timed things within it; operations are multiplications and additions."""

    group: str
    name: str
    own_s: float = 0.0
    whole_s: float = 0.0
    calls: int = 0
    operations: float = 0.0


@dataclass(slots=True)
class _Call:
    """A call under way; within_s: seconds of the timed calls that it made."""

    group: str
    name: str
    within_s: float = 0.0


@dataclass(slots=True, eq=False)
class StepTimes:
    """Sums over the steps since the timers were put in place."""

    parts: dict[tuple[str, str], Part] = field(default_factory=dict)
    num_steps: int = 0
    num_tokens: int = 0
    num_chunks: int = 0
    num_context_tokens: int = 0
    _open: list[_Call] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return sum(part.own_s for part in self.parts.values())

    def groups(self) -> dict[str, list[Part]]:
        """Parts by group, largest first."""
        found: dict[str, list[Part]] = {}
        for part in sorted(self.parts.values(), key=lambda part: -part.own_s):
            found.setdefault(part.group, []).append(part)
        return dict(sorted(found.items(), key=lambda item: -sum(part.own_s for part in item[1])))

    def timed(
        self, call: Callable[..., Any], name: str, group: str | None, operations_of_row: float = 0.0
    ) -> Callable[..., Any]:
        """`call` with a timer around it. group None: that of the caller, and its name before this one.

        operations_of_row   how much is computed for each row of the first argument
        """
        clock, under_way, parts = time.perf_counter, self._open, self.parts

        def timed_call(*args: Any, **options: Any) -> Any:
            caller = under_way[-1] if under_way else None
            own_group, own_name = group or REST, name
            if group is None and caller is not None:
                own_group, own_name = caller.group, f"{caller.name}: {name}"
            inner = _Call(own_group, own_name)
            under_way.append(inner)
            start = clock()
            try:
                return call(*args, **options)
            finally:
                seconds = clock() - start
                under_way.pop()
                part = parts.get((own_group, own_name))
                if part is None:
                    part = parts[own_group, own_name] = Part(own_group, own_name)
                part.own_s += seconds - inner.within_s
                part.calls += 1
                if caller is not None:
                    caller.within_s += seconds
                # A layer's method that calls another one of it counts once.
                if caller is None or (caller.group, caller.name) != (own_group, own_name):
                    part.whole_s += seconds
                    if operations_of_row:
                        part.operations += operations_of_row * len(args[0])

        return timed_call


class _Timers:
    """Puts timers in place of attributes and remembers what was there."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, label: str, group: str | None, *, operations_of_row: float = 0.0) -> None:
        value = getattr(owner, name)
        self.replace(owner, name, self.times.timed(value, label, group, operations_of_row))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Also in objects that are frozen or keep attributes in slots."""
        old = vars(owner).get(name) if hasattr(owner, "__dict__") else getattr(owner, name)

        def undo() -> None:
            if old is None:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, old)

        object.__setattr__(owner, name, value)
        self._undo.append(undo)

    def take_out(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def kernels(self, table: Ops) -> None:
        """Every function of a kernel table, and of the objects in it that hold functions. Nothing does whole layers."""
        if table.decoder is not None:
            self.replace(table, "decoder", None)
        for one in fields(table):
            value = getattr(table, one.name)
            if callable(value):
                self.put(table, one.name, one.name, _purpose(one.name))
            elif hasattr(value, "__dict__"):
                for name in dir(value):
                    if not name.startswith("_") and callable(getattr(value, name)):
                        self.put(value, name, name, _purpose(name))

    def layer(self, layer: nn.Module, label: str) -> None:
        """What a model calls of a layer: its own public methods."""
        group, operations = _kind(layer)
        kinds = [kind for kind in type(layer).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
        own = {name for kind in kinds for name, value in vars(kind).items() if callable(value)}
        for name in sorted(own - _LOADING):
            if not name.startswith("_"):
                purpose = _purpose(name) or group
                self.put(layer, name, label, purpose, operations_of_row=operations if purpose == group else 0.0)


def _purpose(name: str) -> str | None:
    return next((group for word, group in _BY_NAME.items() if word in name), None)


def _kind(layer: nn.Module) -> tuple[str, float]:
    """(group, operations for each row) of a layer that owns parameters."""
    if isinstance(layer, Linear):
        operations = 2.0 * layer.in_features * sum(layer.out_parts.values())
        return (HEAD if isinstance(layer, LMHead) else PRODUCTS), operations
    return (NORMS if isinstance(layer, RMSNorm) else EMBEDDING), 0.0


@contextmanager
def step_timers(engine: Engine) -> Iterator[StepTimes]:
    """Timers in every step of an engine with a model in this process, until the context is left. Each step is waited
    for in there, so that its parts do not go on beside the next one's."""
    from batchinfer.runner import local

    one_by_one = ExitStack()
    one_by_one.enter_context(engine.waiting_for_each_step())
    times = StepTimes()
    timers = _Timers(times)
    runner: Any = engine.runner
    model = runner._model
    try:
        kinds = (Linear, RMSNorm, Embedding)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
        tables = {id(ops): ops for module in model.modules() if isinstance(ops := getattr(module, "ops", None), Ops)}
        for ops in tables.values():
            timers.kernels(ops)
        for name, layer in layers.items():
            timers.layer(layer, ".".join(word for word in name.split(".") if not word.isdigit()))
        for name, group in (("forward", REST), ("compute_logits", HEAD), ("greedy", HEAD)):
            timers.put(model, name, f"model.{name}", group)
        for backend in runner._backends:
            timers.put(backend, "plan", "attention plan", TENSORS)
            timers.put(backend, "run", "attention", ATTENTION)
        timers.put(local, "make_step_batches", "step tensors", TENSORS)
        for name in ("_sample", "_prompt_logprobs"):
            timers.put(runner, name, name.strip("_"), SAMPLING)
        timers.replace(runner, "execute", times.timed(_counted(runner.execute, times), "runner", REST))
        for name in ("schedule", "commit"):
            timers.put(engine.scheduler, name, name, SCHEDULING)
        timers.put(engine, "_collect", "texts and outcomes", OUTPUTS)
        timers.put(engine, "step", "engine", REST)
        yield times
    finally:
        timers.take_out()
        one_by_one.close()


def _counted(execute: Callable[..., Any], times: StepTimes) -> Callable[..., Any]:
    def counted(plan: Any) -> Any:
        times.num_steps += 1
        times.num_chunks += len(plan.chunks)
        for chunk in plan.chunks:
            times.num_tokens += len(chunk.token_ids)
            times.num_context_tokens += chunk.start + len(chunk.token_ids)
        return execute(plan)

    return counted
