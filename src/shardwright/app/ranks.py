"""The few words data ranks exchange outside the engine: losses, a wish to stop, what is wrong.

One small reduction per step; the ledger, which accounts for the engine, doesn't count it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwright.core.errors import RankMismatchError
from shardwright.runtime.transport.control import gather_objects, gather_stack, sum_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright.runtime.mesh import Mesh

__all__ = ["DataRanks"]


class DataRanks:
    """The ranks that see different data, as seen from this one."""

    def __init__(self, mesh: Mesh) -> None:
        """Take the data axis of a mesh.

        Args:
            mesh: From `sw.init_mesh`.
        """
        self._device = mesh.device
        self._axis = mesh.data_axis
        self.rank = mesh.data_rank
        self.size = mesh.data_size

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add numbers over the ranks, in fp64. Collective.

        Args:
            values: This rank's, as many on every rank.

        Returns:
            The sums, the same on every rank.
        """
        if self.size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64, device=self._device)
        return [float(value) for value in sum_over(packed, self._axis).tolist()]

    def gather(self, text: str) -> list[str]:
        """Collect a text from every rank. Collective.

        Args:
            text: This rank's.

        Returns:
            All of them in rank order, on every rank.
        """
        return gather_objects(self._axis, text)

    def require_equal(self, what: str, fingerprint: str, remedy: str) -> None:
        """Raise on all ranks unless all have the same fingerprint. Collective.

        Args:
            what: Name of what is compared, for the message.
            fingerprint: Hexadecimal digest, at least 15 digits.
            remedy: What to do, for the message.

        Raises:
            RankMismatchError: Naming the ranks that differ from the first.
        """
        if self.size == 1:
            return
        mine = torch.tensor([int(fingerprint[:15], 16)], dtype=torch.int64, device=self._device)
        values = [int(value) for value in gather_stack(mine, self._axis).flatten().tolist()]
        different = [rank for rank, value in enumerate(values) if value != values[0]]
        if different:
            raise RankMismatchError(
                f"all ranks must hold the same {what}; found ranks {different} different from "
                f"rank 0; {remedy}"
            )
