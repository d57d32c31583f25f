"""Which physical block holds which prefix.

Responsible for: the chain of keys of a sequence's blocks, and the index from keys to blocks. Not for: reference
counts, eviction (`block_manager`), nor when a block may be published (`scheduler`).

A block's key is (hash of the parent's key, its token ids). A hit walks from the first block and compares whole keys,
never the hash alone: blocks of different tokens can't be taken for each other, and blocks of equal tokens only if
two different prefixes before them have the same 64-bit hash. Where whole blocks end, the block that has most leading
tokens in common with what comes next is found among the children of the last one, as in `branches`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

from batchinfer.scheduling.branches import TOKEN_BYTES, longest_among, num_common

BlockKey = tuple[int, bytes]
ROOT_HASH = 0x5EED


class PrefixChain:
    """Keys of a token list's full blocks, made once and as far as needed.

    Block i holds tokens i*block_size .. (i+1)*block_size; keys[i] = (hashes[i-1], those tokens as a run) and
    hashes[i] = hash(keys[i]). Tokens before the chain's end must not change afterwards.
    """

    __slots__ = ("block_bytes", "block_size", "hashes", "keys")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.hashes: list[int] = []
        self.keys: list[BlockKey] = []

    def extend(self, run: bytes) -> None:
        """Makes the keys of the full blocks of a run that begins where the chain ends."""
        hashes, keys, size = self.hashes, self.keys, self.block_bytes
        parent = hashes[-1] if hashes else ROOT_HASH
        for stop in range(size, len(run) + 1, size):
            key = (parent, run[stop - size : stop])
            parent = hash(key)
            keys.append(key)
            hashes.append(parent)

    def parent_of(self, place: int) -> int:
        """Hash of the key before that of block `place`."""
        return self.hashes[place - 1] if place else ROOT_HASH


class Fork:
    """Blocks behind one parent, by their runs in order; no two have the same run."""

    __slots__ = ("blocks", "runs")

    def __init__(self, block: int, run: bytes) -> None:
        self.blocks = [block]
        self.runs = [run]

    def find(self, run: bytes) -> int | None:
        place = bisect_left(self.runs, run)
        return self.blocks[place] if self.runs[place : place + 1] == [run] else None

    def add(self, block: int, run: bytes) -> bool:
        """False where another block has the run."""
        place = bisect_left(self.runs, run)
        if self.runs[place : place + 1] == [run]:
            return False
        self.runs.insert(place, run)
        self.blocks.insert(place, block)
        return True

    def remove(self, block: int, run: bytes) -> None:
        place = bisect_left(self.runs, run)
        assert self.blocks[place] == block, "another block has the run"
        del self.runs[place], self.blocks[place]


class PrefixIndex:
    """Published blocks by what is before them: the hash of the parent's key.

    A block has at most one key and a key at most one block. A key with fewer tokens than a block has is a tail: the
    filled part of a block, which its sequence may go on writing behind. Nearly every parent has one block behind it,
    which then stands for itself.
    """

    __slots__ = ("_after", "_block_bytes", "key_of")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._after: dict[int, int | Fork] = {}
        self.key_of: list[BlockKey | None] = [None] * num_blocks  # to look at

    def match(self, chain: PrefixChain, max_blocks: int) -> list[int]:
        """Published full blocks of the longest prefix of the chain, at most `max_blocks` of them."""
        after, key_of = self._after, self.key_of
        blocks: list[int] = []
        for key in chain.keys[:max_blocks]:
            block = after.get(key[0])
            if isinstance(block, Fork):
                block = block.find(key[1])
            elif block is not None and key_of[block] != key:
                break
            if block is None:
                break
            blocks.append(block)
        return blocks

    def match_part(self, parent: int, run: bytes) -> tuple[int, int | None]:
        """(leading tokens, a block behind this parent whose first slots hold them), or (0, None)."""
        found = self._after.get(parent)
        if found is None:
            return 0, None
        if isinstance(found, Fork):
            count, place = longest_among(found.runs, run)
            return count, found.blocks[place] if count else None
        key = self.key_of[found]
        assert key is not None
        count = num_common(key[1], run)
        return count, found if count else None

    def publish(self, blocks: Iterable[int], keys: Iterable[BlockKey]) -> None:
        """Files computed full blocks. One whose key another block has already stays private."""
        key_of, after = self.key_of, self._after
        for block, key in zip(blocks, keys, strict=True):
            tail = key_of[block]
            if tail is not None:  # until now
                assert len(tail[1]) < self._block_bytes, f"block {block} is published twice"
                self.drop((block,))
            # What is there is another number: this block has no key.
            if after.setdefault(key[0], block) == block or self._add_behind(block, key):
                key_of[block] = key

    def _add_behind(self, block: int, key: BlockKey) -> bool:
        """Beside what is behind the parent already; False where that is a block with this key."""
        parent, run = key
        found = self._after[parent]
        if not isinstance(found, Fork):
            other = self.key_of[found]
            assert other is not None
            if other[1] == run:
                return False
            self._after[parent] = found = Fork(found, other[1])
        return found.add(block, run)

    def publish_tail(self, block: int, key: BlockKey) -> None:
        """Files the filled part of a block. Where other blocks hold all of it already it stays private."""
        assert self.key_of[block] is None, f"block {block} is published twice"
        parent, run = key
        if self.match_part(parent, run)[0] * TOKEN_BYTES < len(run):
            if self._after.setdefault(parent, block) != block:
                self._add_behind(block, key)
            self.key_of[block] = key

    def drop(self, blocks: Iterable[int]) -> None:
        """Forgets what these blocks, with keys, held; must come before their slots are written for another prefix."""
        key_of, after = self.key_of, self._after
        for block in blocks:
            key = key_of[block]
            assert key is not None
            key_of[block] = None
            found = after.pop(key[0])
            if isinstance(found, Fork):
                found.remove(block, key[1])
                after[key[0]] = found if len(found.blocks) > 1 else found.blocks[0]
            else:
                assert found == block, "another block is behind the parent"

    def check(self) -> None:
        """Asserts that the index and the blocks' keys mirror each other."""
        keys = {block: key for block, key in enumerate(self.key_of) if key is not None}
        filed: dict[int, BlockKey] = {}
        for parent, found in self._after.items():
            if isinstance(found, Fork):
                assert len(found.blocks) == len(found.runs) > 1, "a fork of less than two blocks was kept"
                assert all(a < b for a, b in pairwise(found.runs)), "runs are not in order"
                filed.update(zip(found.blocks, ((parent, run) for run in found.runs), strict=True))
            else:
                filed[found] = keys.get(found, (parent, b""))
                assert filed[found][0] == parent, f"block {found} is filed behind another parent"
        assert filed == keys, "the index and the blocks' keys differ"
        assert len(set(keys.values())) == len(keys), "two blocks have a key"
        assert all(0 < len(run) <= self._block_bytes for _, run in keys.values()), "a key that is no block's"
