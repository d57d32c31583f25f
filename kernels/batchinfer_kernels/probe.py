"""What is measured about a machine's matrix products, so that a row's bytes do not depend on its batch-mates.

A BLAS may add up a row's product in another order when there are more rows or more threads. `find_row_rule` tries,
in a few milliseconds and for the shapes that a model has, the cheapest rule under which it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# With one thread and with several; the second kind is slow where other processes hold the cores.
_ROWS_ALONE = (1, 2, 3, 5, 16, 17, 40)
_ROWS_THREADED = (1, 7, 18, 40)
_MOST_ROWS = 40
_MAX_OUTPUTS = 512
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
    if 0 < rows < padded:
        x = torch.cat((x, x[-1:].expand(padded - rows, -1)))
    if rule.tile_rows is None or padded == rule.tile_rows:
        y = F.linear(x, weight, bias)
    else:
        y = torch.cat([F.linear(tile, weight, bias) for tile in torch.split(x, rule.tile_rows)])
    return y if padded == rows else y[:rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """Products of attention: row counts of its tiles and widths of a split, both ascending (see attention.plan).
    `single`: there is one KV head, so that one tile may be all of a batched product."""

    head_dim: int
    row_counts: tuple[int, ...]
    widths: tuple[int, ...]
    single: bool = False


def find_row_rule(
    shapes: Iterable[tuple[int, int]],
    *,
    wide: Iterable[tuple[int, int]] = (),
    attention: Callable[[RowRule], AttentionTiles] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> RowFacts:
    """The first of RULES under which rows are equal for all tried row and thread counts.

    shapes     of weights [N, K]
    wide       of weights that are multiplied in float32 whatever dtype is
    attention  the tiles that attention makes under a rule, whose products are tried as well
    The thread count of the process is left as it was.
    """
    threads_now = torch.get_num_threads()
    threads = tuple(sorted({1, threads_now}))
    generator = torch.Generator().manual_seed(0)
    cases = []
    tried = dict.fromkeys([(*shape, dtype) for shape in shapes] + [(*shape, torch.float32) for shape in wide])
    for outputs, inputs, of_type in tried:
        outputs = max(1, min(outputs, _MAX_OUTPUTS, _MAX_MACS // (inputs * _MOST_ROWS)))
        weight = torch.rand(outputs, inputs, generator=generator).sub_(0.5).to(device, of_type)
        x = torch.rand(_MOST_ROWS, inputs, generator=generator).sub_(0.5).to(device, of_type)
        cases.append((x, weight))
    try:
        for rule in RULES:
            holds = all(_holds(x, weight, rule, threads) for x, weight in cases)
            if holds and attention is not None:
                holds = _attention_holds(attention(rule), threads, device)
            if holds:
                return RowFacts(rule=rule, holds=True, threads=threads)
    finally:
        torch.set_num_threads(threads_now)
    return RowFacts(rule=RULES[-1], holds=False, threads=threads)


def _attention_holds(tiles: AttentionTiles, threads: tuple[int, ...], device: str) -> bool:
    generator = torch.Generator().manual_seed(1)
    rows, width = tiles.row_counts[-1], tiles.widths[-1]
    queries = torch.rand(3, rows, tiles.head_dim, generator=generator).sub_(0.5).to(device)
    keys = torch.rand(3, width, tiles.head_dim, generator=generator).sub_(0.5).to(device)
    weights = torch.rand(3, rows, width, generator=generator).to(device)
    # Later slots have weight zero: a split that is as full as a width can hold must come out the same in wider ones.
    full = {w: weights * (torch.arange(width, device=device) < w - 1) for w in tiles.widths}
    scores = torch.bmm(queries, keys.transpose(1, 2))
    values = {w: torch.bmm(full[w], keys) for w in tiles.widths}
    for count in threads:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        alone = count == 1
        for m in tiles.row_counts if alone else {rows, tiles.row_counts[0]}:
            for w in tiles.widths if alone else {width, tiles.widths[0]}:
                for batch in (1, 3) if alone or tiles.single else (3,):
                    got = torch.bmm(queries[:batch, :m], keys[:batch, :w].transpose(1, 2))
                    if not torch.equal(got, scores[:batch, :m, :w]):
                        return False
                    for narrow in (n for n in tiles.widths if n <= w):
                        got = torch.bmm(full[narrow][:batch, :m, :w].contiguous(), keys[:batch, :w])
                        if not torch.equal(got, values[narrow][:batch, :m]):
                            return False
    return True


def _holds(x: Tensor, weight: Tensor, rule: RowRule, threads: tuple[int, ...]) -> bool:
    expected: Tensor | None = None
    for count in threads:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        for rows in reversed(_ROWS_ALONE if count == 1 else _ROWS_THREADED):
            got = product(x[:rows], weight, None, rule)
            if expected is None:
                expected = got
            if not torch.equal(got, expected[:rows]):
                return False
    return True
