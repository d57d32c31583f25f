"""Which physical block holds which prefix.

Responsible for: the chain of keys of a sequence's blocks, and the index from keys to blocks. Not for: reference
counts, eviction (`block_manager`), nor when a block may be published (`scheduler`).

A block's key is (hash of the parent's key, its token ids). A hit walks from the first block and compares whole keys,
never the hash alone: blocks of different tokens can't be taken for each other, and blocks of equal tokens only if
two different prefixes before them have the same 64-bit hash. Where whole blocks end, the block that has most leading
tokens in common with what comes next is found among the children of the last one (`branches`).
"""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.scheduling.branches import Branches

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
    """Published blocks by key: full ones by their hash, and what every one of them holds behind which parent.

    A block has at most one key and a key at most one block. A key with fewer tokens than a block has is a tail: the
    filled part of a block, which its sequence may go on writing behind.
    """

    __slots__ = ("_block_of", "_branches", "_hash_of", "_key_of")

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[int, int] = {}  # hash of key -> full block
        self._hash_of: list[int | None] = [None] * num_blocks  # of full blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._branches: Branches[int] = Branches()

    def __len__(self) -> int:
        """Full blocks."""
        return len(self._block_of)

    def holds(self, block: int) -> bool:
        return self._key_of[block] is not None

    def hash_of(self, block: int) -> int | None:
        """Hash of a full block's key; None for a tail, and where there is no key."""
        return self._hash_of[block]

    def match(self, chain: PrefixChain, max_blocks: int) -> list[int]:
        """Published full blocks of the longest prefix of the chain, at most `max_blocks` of them."""
        block_of, key_of = self._block_of, self._key_of
        blocks: list[int] = []
        for value, key in zip(chain.hashes[:max_blocks], chain.keys, strict=False):
            block = block_of.get(value)
            if block is None or key_of[block] != key:
                break
            blocks.append(block)
        return blocks

    def match_part(self, parent: int, tokens: tuple[int, ...]) -> tuple[int, int | None]:
        """(leading tokens, a block behind this parent whose first slots hold them), or (0, None)."""
        return self._branches.longest(parent, tokens)

    def publish(self, block: int, value: int, key: BlockKey) -> bool:
        """Files a computed full block. False where another block has that hash already: the block stays private."""
        if self._key_of[block] is not None:
            assert self._hash_of[block] is None, f"block {block} is published twice"
            self.drop(block)  # it was a tail until now
        if value in self._block_of:
            return False
        self._block_of[value] = block
        self._hash_of[block] = value
        self._key_of[block] = key
        self._branches.add(key[0], key[1], block)
        return True

    def publish_tail(self, block: int, key: BlockKey) -> bool:
        """Files the filled part of a block. False where other blocks hold it already: the block stays private."""
        assert self._key_of[block] is None, f"block {block} is published twice"
        parent, tokens = key
        if self._branches.longest(parent, tokens)[0] == len(tokens):
            return False
        self._key_of[block] = key
        self._branches.add(parent, tokens, block)
        return True

    def drop(self, block: int) -> None:
        """Forgets what the block held; must come before its slots are written for another prefix."""
        key = self._key_of[block]
        if key is not None:
            self._key_of[block] = None
            self._branches.remove(key[0], key[1], block)
            value = self._hash_of[block]
            if value is not None:
                self._hash_of[block] = None
                del self._block_of[value]

    def check(self) -> None:
        """Asserts that the index and the blocks' keys mirror each other."""
        for value, block in self._block_of.items():
            key = self._key_of[block]
            assert key is not None, f"hash {value} points at block {block}, which has no key"
            assert self._hash_of[block] == value == hash(key), f"stale hash on block {block}"
        hashed = sum(value is not None for value in self._hash_of)
        assert hashed == len(self._block_of), f"{hashed} blocks have hashes, {len(self._block_of)} are in the index"
        branches = {block: (parent, tokens) for parent, tokens, block in self._branches}
        keys = {block: key for block, key in enumerate(self._key_of) if key is not None}
        assert branches == keys, "branches and keys differ"
        self._branches.check()
