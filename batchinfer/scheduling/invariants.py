"""What must hold of a scheduler between steps. For tests and for finding bugs: it walks everything."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from batchinfer.scheduling.block_manager import BlockManager
from batchinfer.scheduling.sequence import Sequence, Status


def check_queues(queues: SequenceOf[tuple[SequenceOf[Sequence], Status]], known: dict[int, Sequence]) -> None:
    """Every sequence is in exactly one queue, and its status says which; running queues are in order of arrival."""
    everyone = [seq for queue, _ in queues for seq in queue]
    assert len({id(seq) for seq in everyone}) == len(everyone) == len(known), "a sequence is in two queues, or in none"
    assert all(known[seq.seq_id] is seq for seq in everyone)
    for queue, status in queues:
        assert all(seq.status is status for seq in queue), f"a sequence is not {status.name}"
        if status in (Status.PREFILLING, Status.DECODING):
            arrivals = [seq.arrival for seq in queue]
            assert arrivals == sorted(arrivals), f"sequences are {status.name} out of order"


def check_blocks(
    running: SequenceOf[Sequence],
    waiting: SequenceOf[Sequence],
    managers: SequenceOf[BlockManager],
    held: SequenceOf[tuple[int, list[int]]],
) -> None:
    """Blocks belong to running sequences, as many as they need, or are held (group, blocks); reference counts are the
    number of users."""
    for seq in running:
        num_tokens = len(seq.token_ids)
        assert 0 <= seq.num_computed < num_tokens < seq.max_total_tokens, seq
        assert seq.num_computed <= seq.num_slots, seq
        assert seq.status is Status.PREFILLING or seq.num_computed == num_tokens - 1, seq
        for table, manager in zip(seq.block_tables, managers, strict=True):
            assert len(set(table)) == len(table), f"{seq} has a block twice"
            assert len(table) <= -(-num_tokens // manager.block_size), f"{seq} has blocks to spare"
        check_copies(seq, managers)
    for seq in waiting:
        assert not any(seq.block_tables) and not seq.copies, f"{seq} owns blocks"
    for group, manager in enumerate(managers):
        sources = [copy.source for seq in running for copy in seq.copies if copy.group == group]
        others = [blocks for of_group, blocks in held if of_group == group]
        manager.check([*(seq.block_tables[group] for seq in running), sources, *others])


def check_copies(seq: Sequence, managers: SequenceOf[BlockManager]) -> None:
    """A copy goes into the sequence's own block in which its computed prefix ends, in each group where it ends inside
    one."""
    if not seq.copies:
        return
    assert seq.status is Status.PREFILLING, f"{seq} has copies left"
    copied = {copy.group: copy for copy in seq.copies}
    for group, manager in enumerate(managers):
        place, offset = divmod(seq.num_computed, manager.block_size)
        copy = copied.pop(group, None)
        assert (copy is not None) == (offset > 0), f"{seq}: a copy too many or too few in group {group}"
        if copy is not None:
            assert copy.destination == seq.block_tables[group][place], f"{seq}: a copy into another block"
            assert copy.source not in seq.block_tables[group], f"{seq}: a copy from its own block"
            assert manager.is_private(copy.destination), f"{seq}: a copy into a block that others can see"
    assert not copied, f"{seq}: copies in groups that are not there"
