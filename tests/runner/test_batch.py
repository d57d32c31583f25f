"""A step's token ids, where those that the step before it has sampled are not known on the host."""

from __future__ import annotations

import pytest
import torch

from batchinfer.errors import EngineError
from batchinfer.runner.batch import Sampled, StepBatches, make_step_batches
from batchinfer.runner.sequence_state import SequenceState
from batchinfer.types.request import SamplingParams
from batchinfer.types.step import UNKNOWN_TOKEN, Chunk, SequenceSpec

# Of sequence 3 the token at position 5, of sequence 4 none, of sequence 5 that at position 2.
LAST = Sampled(torch.tensor([70, -1, 90]), {(3, 5): 2, (4, 8): 1, (5, 2): 0})


def batches_of(*chunks: Chunk) -> StepBatches:
    states = [SequenceState(SequenceSpec(chunk.seq_id, (1,), SamplingParams(), 0), 1) for chunk in chunks]
    return make_step_batches(chunks, states, LAST)


def unknown(seq_id: int, position: int) -> Chunk:
    return Chunk(seq_id, position, (UNKNOWN_TOKEN,), ([0],), 1)


def test_tokens_are_put_in_where_they_lie() -> None:
    batches = batches_of(unknown(4, 8), Chunk(9, 0, [11, 12], ([0],), 1), unknown(5, 2), unknown(3, 5))
    assert batches.known(torch.from_numpy(batches.token_ids)).tolist() == [0, 11, 12, 70, 90]
    assert batches.positions.tolist() == [8, 0, 1, 2, 5]


@pytest.mark.parametrize("position", [4, 6])
def test_a_token_of_another_position_is_not_taken_for_it(position: int) -> None:
    """As it would be where a call was interrupted when a step had been launched, and that step is launched again."""
    with pytest.raises(EngineError, match=f"sequence 3: nothing was sampled last for position {position}"):
        batches_of(unknown(5, 2), unknown(3, position))
