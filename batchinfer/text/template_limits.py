"""Bounds on a template's time and memory: `BoundedEnvironment`, Jinja's immutable sandbox with a budget.

A model's template is somebody else's code, run once a row. Nothing here needs a signal, a thread or a trace function:

* Steps: every loop pays for its items when it starts (Jinja loops over finite things only), and so does a filter that
  looks at each; every call of a macro, method or recursive loop pays one. Long loops, filters and methods over long
  values, and every 64th payment look at the thread's CPU time as well. A row that runs out is TEMPLATE_TIMEOUT; the
  step count is the same on every machine.
* Containers that hold the same list many times are small and look endless to whatever compares, hashes or writes them:
  they are counted before that.
* Memory: what can multiply text or lists (`+`, `*`, `**`, `%`, `~`, joins, padding, replace, captured blocks) is
  measured before it is done, or right after where it can at most double.
* `random`, `lipsum`, sets, and objects of Python's that write their address, are refused: a row's prompt must be the
  same at every attempt.

Cost where nothing is wrong: well under a microsecond per loop or call.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000
MAX_CPU_S = 10.0
MAX_CHARS = 1 << 24  # beyond four times the row's own text
_MAX_WIDTH = 100_000
_MAX_INT_BITS = 100_000
_LONG_LOOP = 1000
_LONG = 10_000  # characters or items: what is done to such a value is followed by a look at the time
_MAX_SLOW_CHARS = 50_000
_MAX_MADE = 128  # times what one value may hold
_MAX_COMPARED = 1 << 18
_ITEM_FILTERS = frozenset(
    {
        "batch",
        "dictsort",
        "groupby",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "title",
        "unique",
        "urlencode",
        "wordcount",
        "xmlattr",
    }
)  # they do something in Python for each item, character or word
_SLOW_FILTERS = frozenset(("striptags", "urlize", "wordwrap"))  # time grows faster than the text
_SHALLOW_FILTERS = frozenset(
    {
        "attr",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "safe",
        "select",
        "selectattr",
    }
)  # they do not look into nested containers (tests that they apply are bounded themselves)
_COMPARING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "sum", "unique"})
_COMPARING_TESTS = (
    "eq",
    "==",
    "equalto",
    "ne",
    "!=",
    "lt",
    "<",
    "lessthan",
    "le",
    "<=",
    "gt",
    ">",
    "greaterthan",
    "ge",
    ">=",
    "in",
)
_COMPARING_METHODS = ("index", "count", "get", "isdisjoint", "changed")
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type[Any], ...] = (
    list,
    tuple,
    dict,
    Namespace,
    *_VIEWS,
)  # what can hold other values that it writes and compares
_AMPLIFYING_FILTERS = (
    "batch",
    "center",
    "format",
    "indent",
    "join",
    "pprint",
    "replace",
    "round",
    "slice",
    "string",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{6,})")
_WIDE_FORMAT = re.compile(r":[^{}]*(?:\{|\d{6,})")


class TemplateTimeout(Exception):
    """Inside this room only: a template used up its steps or its time."""


class _Budget(threading.local):
    """What is left for the rendering that this thread is doing. Compile-time evaluation gets a small one."""

    def __init__(self) -> None:
        self.start(input_chars=0)

    def start(self, *, input_chars: int, steps: int = MAX_STEPS, cpu_s: float = MAX_CPU_S) -> None:
        self.steps = self.max_steps = steps
        self.cpu_s = cpu_s
        self.deadline = time.thread_time() + cpu_s
        self.max_chars = MAX_CHARS + 4 * input_chars
        self.made = 0
        self.payments = 0

    def pay(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise TemplateTimeout(f"the template ran more than {self.max_steps:,} steps")
        self.payments += 1
        if not self.payments & 63:
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise TemplateTimeout(f"the template ran longer than {self.cpu_s:g} s")

    def need(self, size: int) -> None:
        if size > self.max_chars:
            raise SecurityError(
                f"the template makes a value of {size:,} characters or items; {self.max_chars:,} is the limit"
            )

    def make(self, size: int, item_bytes: int = 1) -> None:
        """Before or after a value of this size is made. It may be held: so long ones are limited together, too."""
        self.need(size)
        if size > _LONG:
            self.made += size * item_bytes
            if self.made > _MAX_MADE * self.max_chars:
                raise SecurityError(f"the template makes long values of {self.made:,} bytes in all")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """`start_row` gives this thread a new budget; then templates of this environment may be rendered."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._finalized, **options)
        self._budget = _Budget()
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters["_counted"] = self._counted
        self.filters["_joined"] = self._joined
        self.filters["_compared"] = self._compared
        for name in _AMPLIFYING_FILTERS:
            self.filters[name] = self._bounded_filter(self.filters[name])
        for name, function in list(self.filters.items()):
            if not name.startswith("_"):
                self.filters[name] = self._metered_filter(name, function)
        for name in _COMPARING_TESTS:
            self.tests[name] = self._comparing_test(cast(Any, self.tests[name]))
        self.filters["random"] = _refused("random")
        self.globals.pop("lipsum", None)

    def start_row(self, *, input_chars: int, steps: int = MAX_STEPS, cpu_s: float = MAX_CPU_S) -> None:
        self._budget.start(input_chars=input_chars, steps=steps, cpu_s=cpu_s)

    def bounded_size(self, value: Any) -> None:
        """Refuses a container that has too many items when written out (it may hold itself many times)."""
        if isinstance(value, _CONTAINERS):
            size = _written_size(value, self._budget.max_chars)
            self._budget.need(size)
            if size > _LONG:
                self._budget.check_time()

    def _compared(self, value: Any) -> Any:
        """What is compared or hashed, handed on."""
        if isinstance(value, _CONTAINERS):
            size = _written_size(value, _MAX_COMPARED, chars=False)
            if size > _MAX_COMPARED:
                raise SecurityError(f"the template compares a value of more than {_MAX_COMPARED:,} items")
            if size > _LONG_LOOP:
                self._budget.pay(size)
        elif isinstance(value, str) and len(value) > _LONG:
            self._budget.check_time()
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _AddPayments().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                self._budget.make(len(left) + len(right), _item_bytes(left))
        elif operator == "-":
            if isinstance(left, _VIEWS) or isinstance(right, _VIEWS):
                raise jinja2.TemplateRuntimeError("the template makes a set: its order is never the same twice")
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                self._need_bits(left.bit_length() + right.bit_length())
            else:
                for sequence, times in ((left, right), (right, left)):
                    if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
                        self._budget.make(len(sequence) * times, _item_bytes(sequence))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                self._need_bits(left.bit_length() * max(0, right))
        elif isinstance(left, str):
            self._check_format(left, "%", right if isinstance(right, tuple) else (right,))
        return self.binop_table[operator](left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._budget.pay(1)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, bytes)):
            if obj.__name__ == "join" and args and not isinstance(args[0], (list, tuple)):
                args = (list(self._counted(args[0])), *args[1:])
            self._check_method(owner, obj.__name__, (*args, *kwargs.values()))
            if len(owner) > _LONG:
                self._budget.check_time()
        elif isinstance(owner, int) and obj.__name__ == "to_bytes":
            _refuse_wide((*args, *kwargs.values()))
        elif isinstance(owner, (*_CONTAINERS, LoopContext)) and obj.__name__ in _COMPARING_METHODS:
            for value in args if isinstance(owner, (dict, LoopContext)) else (owner, *args):
                self._compared(value)
        elif getattr(obj, "__name__", None) in ("format", "format_map") and hasattr(obj, "__wrapped__"):
            owner = obj.__wrapped__.__self__
            if isinstance(owner, str):
                self._check_format(owner, "{", (*args, *kwargs.values()))
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, (str, bytes)):
            self._budget.make(len(result))
        return result

    def _check_method(self, owner: str | bytes, method: str, args: tuple[Any, ...]) -> None:
        if method == "replace" and len(args) >= 2 and all(isinstance(arg, type(owner)) for arg in args[:2]):
            if len(args[1]) > len(args[0]):
                self._budget.need(len(owner) + owner.count(args[0]) * len(args[1]))
        elif method == "join" and args:
            size = sum(len(item) for item in args[0] if isinstance(item, (str, bytes)))
            self._budget.need(size + len(owner) * len(args[0]))
        elif method == "translate" and args and isinstance(args[0], dict):
            longest = max((len(text) for text in args[0].values() if isinstance(text, str)), default=1)
            self._budget.need(len(owner) * longest)
        elif method in ("ljust", "rjust", "center", "zfill", "expandtabs"):
            _refuse_wide(args)

    def _check_format(self, text: str, sign: str, values: Iterable[Any]) -> None:
        """Before a format is filled in: each of its fields may show every value."""
        if (_WIDE_PERCENT if sign == "%" else _WIDE_FORMAT).search(text):
            raise SecurityError("the template formats with a width that is computed or beyond 99,999")
        values = list(values)
        size = len(values[0]) if len(values) == 1 and isinstance(values[0], str) else None
        if size is None:
            size = _written_size(values, self._budget.max_chars)
        self._budget.need(len(text) + size * text.count(sign))

    def _need_bits(self, bits: int) -> None:
        if bits > _MAX_INT_BITS:
            raise SecurityError("the template computes a number of more than 30,000 digits")

    def _counted(self, items: Any) -> Any:
        """What each `for` loops over. Short things are paid for and handed on as they are."""
        try:
            size = len(items)
        except TypeError:
            items = self._paid_one_by_one(items) if isinstance(items, Iterator) else items
            self._budget.pay(1)
            return items
        self._budget.pay(size + 1)
        return items if size < _LONG_LOOP else _Timed(items, size, self._budget.check_time)

    def _paid_one_by_one(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._budget.pay(1)
            yield item

    def _joined(self, items: list[Any]) -> str:
        """`a ~ b ~ c`."""
        for item in items:
            self.bounded_size(item)
            _refuse_address(item)
        texts = [item if isinstance(item, str) else str(item) for item in items]
        self._budget.make(sum(map(len, texts)))
        return "".join(texts)

    def _concat(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self._budget.make(sum(map(len, parts)))
        return "".join(parts)

    def _finalized(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.bounded_size(value)
            _refuse_address(value)
        return value

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Pays for long values and looks at the time; refuses what would take too long in one go."""
        per_item, slow, deep = name in _ITEM_FILTERS, name in _SLOW_FILTERS, name not in _SHALLOW_FILTERS
        comparing = name in _COMPARING_FILTERS
        gathers = name == "join" or (per_item and deep)

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            long = False
            if gathers:  # what another filter gives one by one is looked at as a whole
                args = tuple([list(self._counted(arg)) if isinstance(arg, Iterator) else arg for arg in args])
            for value in args:
                if not isinstance(value, (str, *_CONTAINERS)):
                    continue
                if comparing:
                    self._compared(value)
                elif deep and not isinstance(value, str):
                    self.bounded_size(value)
                size = _num_items(value)
                if size > _LONG_LOOP:
                    long = long or size > _LONG
                    if per_item:
                        self._budget.pay(4 * size)
                    elif slow and size > _MAX_SLOW_CHARS:
                        raise SecurityError(
                            f"the template uses {name!r} on {size:,} characters; {_MAX_SLOW_CHARS:,} is the limit"
                        )
            if not long:
                return function(*args, **kwargs)
            self._budget.check_time()
            result = function(*args, **kwargs)
            self._budget.check_time()
            return result

        return metered

    def _comparing_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def compared(*args: Any) -> Any:
            for value in args:
                self._compared(value)
            return function(*args)

        return compared

    def _bounded_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @functools.wraps(function)  # keeps Jinja's marks (pass_environment and the like)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            _refuse_wide(values)
            for value in values:
                self.bounded_size(value)
                if name in ("do_format", "soft_str", "do_pprint"):
                    _refuse_address(value)
            texts = [value for value in values if isinstance(value, str)]
            if name == "do_format" and texts:
                self._check_format(texts[0], "%", values)
            elif name in ("do_replace", "do_indent", "do_wordwrap") and len(texts) >= 2:
                self._budget.need(len(texts[0]) + (texts[0].count(texts[1]) + 1) * len(texts[-1]))
            elif name in ("do_join", "sync_do_join") and texts:
                items = next((value for value in values if isinstance(value, (str, *_CONTAINERS))), ())
                self._budget.need(len(texts[-1]) * _num_items(items))
            result = function(*args, **kwargs)
            if isinstance(result, str):
                self._budget.make(len(result))
            return result

        return bounded


class _Timed:
    """A long sequence that looks at the time while it is looped over; keeps `loop.length` and `loop.last` working."""

    def __init__(self, items: Iterable[Any], size: int, check_time: Callable[[], None]) -> None:
        self._items, self._size, self._check_time = items, size, check_time

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        for n, item in enumerate(self._items):
            if not n & 255:
                self._check_time()
            yield item


class _AddPayments(NodeTransformer):
    """`for x in xs` -> `for x in xs|_counted`; `a ~ b` -> `[a, b]|_joined`; `a == b` -> `a|_compared == b|_compared`
    and `(a, b)` -> `(a, b)|_compared` (tuples are hashed), unless there are constants."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        if not any(map(_is_constant, operands)):
            node.expr = _filtered(node.expr, "_compared")
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, "_compared")
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_constant(node) else _filtered(node, "_compared")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(items, "_joined")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


def _refuse_address(value: Any) -> None:
    """Functions, generators and other objects of Python's write where they lie in memory."""
    if value is None or isinstance(value, (str, bytes, int, float, *_CONTAINERS)):
        return
    if " at 0x" in repr(value)[:200]:
        raise jinja2.TemplateRuntimeError(
            f"the template writes out an object of type {type(value).__name__!r}: its text is never the same twice"
        )


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise jinja2.TemplateRuntimeError(f"{name!r} is refused: a prompt must be the same at every attempt")

    return refuse


def _refuse_wide(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value > _MAX_WIDTH:
            raise SecurityError(f"the template asks for a width or count of {value:,}; {_MAX_WIDTH:,} is the limit")


def _written_size(value: Any, limit: int, *, chars: bool = True) -> int:
    """Items and (with `chars`) characters of nested containers; beyond `limit` anything above it. One that is held many
    times is looked at once; one that holds itself has no end."""
    sizes: dict[int, int] = {}
    held: list[Any] = []  # views make their items as they are asked: these must live on, `sizes` knows them by id
    frames: list[tuple[int, Iterator[Any]]] = [(0, iter((value,)))]
    counts = [0]
    while frames:
        key, items = frames[-1]
        size = counts[-1]
        for item in items:
            if isinstance(item, str):
                size += len(item) if chars else 1
            elif isinstance(item, _CONTAINERS):
                known = sizes.get(id(item))
                if known is None:
                    sizes[id(item)] = limit + 1
                    counts[-1] = size
                    held.append(children := _children(item))
                    frames.append((id(item), iter(children)))
                    counts.append(1)
                    break
                size += known
            else:
                _refuse_address(item)
                size += 1
            if size > limit:
                return size
        else:
            frames.pop()
            counts.pop()
            if not frames:
                return size
            sizes[key] = size
            counts[-1] += size
    return 0


def _item_bytes(sequence: Any) -> int:
    return 1 if isinstance(sequence, (str, bytes)) else 8


def _num_items(value: Any) -> int:
    return 0 if isinstance(value, Namespace) else len(value)


def _children(item: Any) -> Sequence[Any]:
    if isinstance(item, (list, tuple)):
        return item
    if isinstance(item, Namespace):
        item = item._Namespace__attrs
    return [*item.keys(), *item.values()] if isinstance(item, dict) else list(item)
