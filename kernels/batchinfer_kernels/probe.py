"""What is measured about a machine's matrix products, so that a row's bytes do not depend on its batch-mates.

A BLAS may add up a row's product in another order when there are more rows or more threads. `find_row_rule` tries,
in a few milliseconds and for the shapes that a model has, the cheapest rule under which it does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_TRIED_ROWS = (1, 2, 3, 4, 5, 7, 9, 13, 16, 17, 31, 40)
_MAX_OUTPUTS = 1024
_MAX_MACS = 200_000_000  # of one probed product; keeps the probe of a large model short


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """How a product of any number of rows is run so that each row comes out as it would alone.

    min_rows   rows are padded with copies of the last one up to this many
    multiple   and then to a multiple of this
    tile_rows  None: all rows go into one product; else into products of exactly this many rows
    """

    min_rows: int = 4
    multiple: int = 1
    tile_rows: int | None = None

    def padded(self, num_rows: int) -> int:
        """How many rows are run for `num_rows` rows."""
        multiple = self.tile_rows or self.multiple
        return -(-max(num_rows, self.min_rows) // multiple) * multiple


STRICT = RowRule()
RULES = (
    STRICT,
    RowRule(min_rows=4, multiple=4),
    RowRule(min_rows=16, multiple=16),
    RowRule(min_rows=16, tile_rows=16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """`holds` is False where even the last rule was seen to fail; `threads` are the thread counts tried."""

    rule: RowRule
    holds: bool
    threads: tuple[int, ...]


def product(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    """x[T, K] weight[N, K]^T + bias under a rule; [T, N]."""
    rows = x.shape[0]
    padded = rule.padded(rows)
    if padded != rows:
        x = torch.cat((x, x[-1:].expand(padded - rows, -1)))
    if rule.tile_rows is None or padded == rule.tile_rows:
        y = F.linear(x, weight, bias)
    else:
        y = torch.cat([F.linear(tile, weight, bias) for tile in torch.split(x, rule.tile_rows)])
    return y if padded == rows else y[:rows]


def find_row_rule(
    shapes: Iterable[tuple[int, int]], *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> RowFacts:
    """The first of RULES under which rows are equal for all tried row and thread counts, for weights [N, K].

    The thread count of the process is left as it was.
    """
    threads_now = torch.get_num_threads()
    threads = tuple(sorted({1, threads_now}))
    generator = torch.Generator().manual_seed(0)
    cases = []
    for outputs, inputs in dict.fromkeys(shapes):
        outputs = max(1, min(outputs, _MAX_OUTPUTS, _MAX_MACS // (inputs * _TRIED_ROWS[-1])))
        weight = torch.rand(outputs, inputs, generator=generator).sub_(0.5).to(device, dtype)
        x = torch.rand(_TRIED_ROWS[-1], inputs, generator=generator).sub_(0.5).to(device, dtype)
        cases.append((x, weight))
    try:
        for rule in RULES:
            if all(_holds(x, weight, rule, threads) for x, weight in cases):
                return RowFacts(rule=rule, holds=True, threads=threads)
    finally:
        torch.set_num_threads(threads_now)
    return RowFacts(rule=RULES[-1], holds=False, threads=threads)


def _holds(x: Tensor, weight: Tensor, rule: RowRule, threads: tuple[int, ...]) -> bool:
    expected: Tensor | None = None
    for count in threads:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        for rows in reversed(_TRIED_ROWS):
            got = product(x[:rows], weight, None, rule)
            if expected is None:
                expected = got
            if not torch.equal(got, expected[:rows]):
                return False
    return True
