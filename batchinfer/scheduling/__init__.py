"""Which tokens run in which step: sequences, scheduler, KV blocks, prefix index. Standard library only, no I/O."""

from batchinfer.scheduling.block_manager import BlockManager
from batchinfer.scheduling.lookahead import LookaheadScheduler
from batchinfer.scheduling.prefix_index import PrefixChain, PrefixIndex
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.scheduling.sequence import Sequence, Status

__all__ = ["BlockManager", "LookaheadScheduler", "PrefixChain", "PrefixIndex", "Scheduler", "Sequence", "Status"]
