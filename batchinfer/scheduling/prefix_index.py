"""Which physical block holds which prefix.

Responsible for: the chain of keys of a sequence's blocks, and the index from keys to blocks. Not for: reference
counts, eviction (`block_manager`), nor when a block may be published (`scheduler`).

A block's key is (hash of the parent's key, its token ids). A hit walks from the first block and compares whole keys,
never the hash alone: blocks of different tokens can't be taken for each other, and blocks of equal tokens only if
two different prefixes before them have the same 64-bit hash. Where whole blocks end, the block that has most leading
tokens in common with what comes next is found among the children of the last one (`branches`).
"""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.scheduling.branches import TOKEN_BYTES, Branches

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


class PrefixIndex:
    """Published blocks by key, and the keys behind each parent.

    A block has at most one key and a key at most one block. A key with fewer tokens than a block has is a tail: the
    filled part of a block, which its sequence may go on writing behind.
    """

    __slots__ = ("_block_bytes", "_block_of", "_branches", "key_of")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._block_of: dict[BlockKey, int] = {}
        self.key_of: list[BlockKey | None] = [None] * num_blocks  # to look at
        self._branches = Branches()

    def match(self, chain: PrefixChain, max_blocks: int) -> list[int]:
        """Published full blocks of the longest prefix of the chain, at most `max_blocks` of them."""
        block_of = self._block_of
        blocks: list[int] = []
        for key in chain.keys[:max_blocks]:
            block = block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def match_part(self, parent: int, run: bytes) -> tuple[int, int | None]:
        """(leading tokens, a block behind this parent whose first slots hold them), or (0, None)."""
        count, found = self._branches.longest(parent, run)
        return count, self._block_of[parent, found] if count else None

    def publish(self, blocks: Iterable[int], keys: Iterable[BlockKey]) -> None:
        """Files computed full blocks. One whose key another block has already stays private."""
        block_of, key_of, branches = self._block_of, self.key_of, self._branches
        after = branches.after
        for block, key in zip(blocks, keys, strict=True):
            tail = key_of[block]
            if tail is not None:  # until now
                assert len(tail[1]) < self._block_bytes, f"block {block} is published twice"
                self.drop((block,))
            if block_of.setdefault(key, block) != block:
                continue
            key_of[block] = key
            parent, run = key
            if after.setdefault(parent, run) is not run:
                branches.add(parent, run)

    def publish_tail(self, block: int, key: BlockKey) -> None:
        """Files the filled part of a block. Where other blocks hold all of it already it stays private."""
        assert self.key_of[block] is None, f"block {block} is published twice"
        parent, run = key
        if self._branches.longest(parent, run)[0] * TOKEN_BYTES < len(run):
            self._block_of[key] = block
            self.key_of[block] = key
            self._branches.add(parent, run)

    def drop(self, blocks: Iterable[int]) -> None:
        """Forgets what the blocks held; must come before their slots are written for another prefix."""
        block_of, key_of, branches = self._block_of, self.key_of, self._branches
        after = branches.after
        for block in blocks:
            key = key_of[block]
            if key is not None:
                key_of[block] = None
                del block_of[key]
                parent, run = key
                if after[parent] is run:
                    del after[parent]
                else:
                    branches.remove(parent, run)

    def check(self) -> None:
        """Asserts that the index and the blocks' keys mirror each other."""
        keys = {block: key for block, key in enumerate(self.key_of) if key is not None}
        assert {block: key for key, block in self._block_of.items()} == keys, "the index and the blocks' keys differ"
        assert len(self._block_of) == len(keys), "a block has two keys"
        assert all(0 < len(run) <= self._block_bytes for _, run in self._block_of), "a key that is no block's"
        assert sorted(self._branches) == sorted(self._block_of), "branches and keys differ"
        self._branches.check()
