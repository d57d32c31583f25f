"""What is measured about a machine's matrix products, so that a row's bytes do not depend on its batch-mates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """How products of few or many rows are run so that every row comes out the same.

    min_rows   products are padded to at least this many rows
    tile_rows  None: any number of rows from min_rows on gives equal rows; else products run in tiles of exactly
               this many rows
    """

    min_rows: int = 4
    tile_rows: int | None = None
