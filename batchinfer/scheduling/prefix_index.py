"""Which physical block holds which prefix.

Responsible for: the chain of keys of a sequence's blocks, and the index from keys to blocks. Not for: reference
counts, eviction (`block_manager`), nor when a block may be published (`scheduler`).

A block's key is (hash of the parent's key, its token ids). A hit walks from the first block and compares whole keys,
never the hash alone: blocks of different tokens can't be taken for each other, and blocks of equal tokens only if
two different prefixes before them have the same 64-bit hash.
"""

from __future__ import annotations

from collections.abc import Sequence

BlockKey = tuple[int, tuple[int, ...]]
ROOT_HASH = 0x5EED


class PrefixChain:
    """Keys of a token list's full blocks, made once and as far as needed.

    Block i holds tokens i*block_size .. (i+1)*block_size; keys[i] = (hashes[i-1], those tokens) and
    hashes[i] = hash(keys[i]). Tokens before the chain's end must not change afterwards.
    """

    __slots__ = ("block_size", "hashes", "keys")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.hashes: list[int] = []
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Makes the keys of the first `num_blocks` blocks; all of their tokens must be there."""
        hashes, keys, size = self.hashes, self.keys, self.block_size
        done = len(keys)
        if done >= num_blocks:
            return
        parent = hashes[-1] if hashes else ROOT_HASH
        for start in range(done * size, num_blocks * size, size):
            key = (parent, tuple(token_ids[start : start + size]))
            parent = hash(key)
            keys.append(key)
            hashes.append(parent)


class PrefixIndex:
    """Published blocks by key. A block has at most one key and a key at most one block."""

    __slots__ = ("_block_of", "_hash_of", "_key_of")

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[int, int] = {}  # hash of key -> block
        self._hash_of: list[int] = [0] * num_blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_of)

    def holds(self, block: int) -> bool:
        return self._key_of[block] is not None

    def match(self, chain: PrefixChain, max_blocks: int) -> list[int]:
        """Published blocks of the longest prefix of the chain, at most `max_blocks` of them."""
        block_of, key_of = self._block_of, self._key_of
        blocks: list[int] = []
        for value, key in zip(chain.hashes[:max_blocks], chain.keys, strict=False):
            block = block_of.get(value)
            if block is None or key_of[block] != key:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, value: int, key: BlockKey) -> bool:
        """Files a computed block. False where another block has that hash already: the block stays private."""
        if value in self._block_of:
            return False
        assert self._key_of[block] is None, f"block {block} is published twice"
        self._block_of[value] = block
        self._hash_of[block] = value
        self._key_of[block] = key
        return True

    def drop(self, block: int) -> None:
        """Forgets what the block held; must come before its slots are written for another prefix."""
        if self._key_of[block] is not None:
            self._key_of[block] = None
            del self._block_of[self._hash_of[block]]

    def check(self) -> None:
        """Asserts that the index and the blocks' keys mirror each other."""
        for value, block in self._block_of.items():
            key = self._key_of[block]
            assert key is not None, f"hash {value} points at block {block}, which has no key"
            assert self._hash_of[block] == value == hash(key), f"stale hash on block {block}"
        keyed = sum(key is not None for key in self._key_of)
        assert keyed == len(self._block_of), f"{keyed} blocks have keys, {len(self._block_of)} are in the index"
