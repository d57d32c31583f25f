"""Finding the row that kills its engine, by halving the rows that were in flight when it died.

`Probe` holds the suspects and says which of them to run next, alone in an engine. It knows nothing of workers,
leases or time; `job.state` drives it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchinfer.job.events import Piece


def num_rows(pieces: Iterable[Piece]) -> int:
    return sum(piece.num_rows for piece in pieces)


def halve(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Two lists with the first and the second half of the rows; a piece across the middle is cut."""
    left = (num_rows(pieces) + 1) // 2
    first: list[Piece] = []
    second: list[Piece] = []
    for piece in pieces:
        take = min(left, piece.num_rows)
        left -= take
        middle = piece.start + take
        if take:
            first.append(Piece(piece.window, piece.unit, piece.start, middle))
        if middle < piece.stop:
            second.append(Piece(piece.window, piece.unit, middle, piece.stop))
    return first, second


def carve(piece: Piece, start: int, stop: int) -> tuple[list[Piece], Piece | None]:
    """Cut rows `start .. stop` out of a piece: (what is left of it, the rows cut out or None)."""
    start, stop = max(start, piece.start), min(stop, piece.stop)
    if start >= stop:
        return [piece], None
    rest = []
    if piece.start < start:
        rest.append(Piece(piece.window, piece.unit, piece.start, start))
    if stop < piece.stop:
        rest.append(Piece(piece.window, piece.unit, stop, piece.stop))
    return rest, Piece(piece.window, piece.unit, start, stop)


class Probe:
    """One search. States: waiting (`running` empty), or `running` is under way and `spare` waits for its outcome.

    A half that survives clears itself and puts the guilt on the other half; a half that dies clears the other.
    If the deaths had another cause, the search ends with one row that survives, and nobody is blamed.
    """

    def __init__(self, suspects: Sequence[Piece], died_on: str = "") -> None:
        assert suspects
        self.suspects = list(suspects)
        self.running: list[Piece] = []
        self.spare: list[Piece] = []
        self.deaths_alone = 0  # of the single row that is left
        self.died_on = died_on  # the worker of the last death: another one is asked next, if there is one

    def pieces(self) -> list[Piece]:
        return [*self.running, *self.spare] if self.running else list(self.suspects)

    def begin(self) -> list[Piece]:
        """The suspects to run alone now."""
        assert not self.running and self.suspects
        if num_rows(self.suspects) == 1:
            self.running, self.spare = self.suspects, []
        else:
            self.running, self.spare = halve(self.suspects)
        return list(self.running)

    def finished(self, piece: Piece) -> bool:
        """A running piece is done, so it is innocent. True: nothing of the running half is left."""
        self.running.remove(piece)
        return not self.running

    def survived(self) -> bool:
        """All that ran alone is done. True: there are suspects left."""
        self.suspects, self.running, self.spare = self.spare, [], []
        return bool(self.suspects)

    def interrupted(self) -> None:
        """The worker was lost: nothing was learnt."""
        self.suspects, self.running, self.spare = self.pieces(), [], []

    def died(self, hot: Sequence[Piece], worker: str) -> list[Piece]:
        """The engine died on `running`; `hot` are its rows in flight then (none: it died of itself).

        Returns the pieces that are cleared of suspicion.
        """
        self.died_on = worker
        if not hot:
            self.interrupted()
            return []
        if num_rows(hot) == 1:
            self.deaths_alone += 1
        cleared = list(self.spare)
        for piece in self.running:
            rest = [piece]
            for burning in hot:
                if (burning.window, burning.unit) == (piece.window, piece.unit):
                    rest = [left for part in rest for left in carve(part, burning.start, burning.stop)[0]]
            cleared += rest
        self.suspects, self.running, self.spare = list(hot), [], []
        return cleared
