"""Which windows of the tokens each rank reads at each step: pure integers.

The tokens are cut into windows of `seq_len` that don't overlap. Each epoch visits all windows
once, in an order drawn from the seed. A step takes the next `global_batch` windows of that
stream, whatever the number of ranks; inside a step they go to (micro-batch, rank) pairs in order:

    stream    ... | w0 w1 w2 w3 w4 w5 w6 w7 | ...        one step, global batch 8
    micro-batch      0           1                       accumulation 2
    rank             0     1     0     1                 2 ranks, micro-batch size 2
                   w0 w1 w2 w3 w4 w5 w6 w7

So a run on N ranks trains on the same global batches as one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwright.app.data import TooShortError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How a step's sequences are divided.

    Attributes:
        micro_batch: Sequences per rank and micro-batch.
        accumulation: Micro-batches per step.
        num_ranks: Data ranks.
    """

    micro_batch: int
    accumulation: int
    num_ranks: int

    @property
    def global_batch(self) -> int:
        """Sequences per step, over all ranks."""
        return self.micro_batch * self.accumulation * self.num_ranks


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Count the windows of `seq_len` inputs whose targets (one further) exist."""
    return max(0, (num_tokens - 1) // seq_len)


def require_windows(tokens: NDArray[np.unsignedinteger], seq_len: int, name: str) -> int:
    """Count the windows of one part of the data.

    Args:
        tokens: 1-D ids.
        seq_len: Tokens per sequence.
        name: Of the part, for the message.

    Returns:
        The number of windows, at least 1.

    Raises:
        TooShortError: If the tokens hold no window.
    """
    count = num_windows(len(tokens), seq_len)
    if count == 0:
        raise TooShortError(
            f"the {name} data must hold at least seq_len + 1 = {seq_len + 1} tokens; found "
            f"{len(tokens)}; give more data, shorten train.seq_len or change "
            f"data.validation_fraction"
        )
    return count


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Draw the order in which an epoch visits its windows.

    Sorts raw PCG64 output, whose stream numpy keeps stable between versions (the convenience
    methods' is not).

    Args:
        count: Number of windows.
        seed: Of the run, not negative.
        epoch: From 0.

    Returns:
        A permutation of `range(count)`.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def global_windows(count: int, global_batch: int, seed: int, step: int) -> NDArray[np.int64]:
    """List the windows of one step, over all ranks.

    Args:
        count: Number of windows in the data.
        global_batch: Sequences per step.
        seed: Of the run.
        step: From 0.

    Returns:
        `global_batch` window indices; a step that crosses an epoch continues in the next.
    """
    positions = np.arange(step * global_batch, (step + 1) * global_batch)
    epochs, offsets = np.divmod(positions, count)
    windows = np.empty(global_batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        windows[chosen] = epoch_order(count, seed, int(epoch))[offsets[chosen]]
    return windows


def rank_windows(
    windows: NDArray[np.int64], shape: BatchShape, micro_batch_index: int, rank: int
) -> NDArray[np.int64]:
    """Take one rank's part of a step's windows.

    Args:
        windows: From `global_windows`, `shape.global_batch` long.
        shape: How the step is divided.
        micro_batch_index: From 0.
        rank: Data rank, from 0.

    Returns:
        `shape.micro_batch` window indices.
    """
    start = (micro_batch_index * shape.num_ranks + rank) * shape.micro_batch
    return windows[start : start + shape.micro_batch]


def evaluation_windows(count: int, wanted: int, shape: BatchShape, rank: int) -> NDArray[np.int64]:
    """Choose one rank's validation windows; the union is the same on any number of ranks.

    Args:
        count: Number of validation windows.
        wanted: How many to use, spread evenly; all where there are fewer.
        shape: How sequences are divided.
        rank: Data rank, from 0.

    Returns:
        [B, `shape.micro_batch`] window indices with the same B on every rank; -1 where a rank
        has none left.
    """
    used = min(count, wanted)
    chosen = np.arange(used, dtype=np.int64) * count // used
    per_round = shape.num_ranks * shape.micro_batch
    padded = np.full(-(-used // per_round) * per_round, -1, dtype=np.int64)
    padded[:used] = chosen
    return padded.reshape(-1, shape.num_ranks, shape.micro_batch)[:, rank]


def gather_windows(
    tokens: NDArray[np.unsignedinteger], windows: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Copy windows out of the tokens.

    Args:
        tokens: 1-D ids.
        windows: 1-D window indices.
        seq_len: Tokens per window.

    Returns:
        Inputs and targets (each one token further), int64, [len(windows), seq_len].
    """
    positions = windows[:, None] * seq_len + np.arange(seq_len)
    inputs = tokens[positions].astype(np.int64)
    targets = tokens[positions + 1].astype(np.int64)
    return inputs, targets
