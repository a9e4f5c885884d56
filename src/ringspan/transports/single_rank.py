"""A transport whose only rank is this process: plans of one rank run without communication."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringspan.transports.process_group import ProcessGroupTransport
from ringspan.transports.watchdog import group_state


class SingleRank(ProcessGroupTransport):
    """This process alone, out of the ranks of another transport. It sends nothing."""

    def __init__(self, ranks: ProcessGroupTransport) -> None:
        super().__init__(ranks.group)
        self.timeout = ranks.timeout
        own = ranks.global_ranks[ranks.rank]
        self.rank, self.world, self.global_ranks = 0, 1, [own]
        self._state = group_state(ranks.group, (own,), 0)

    def _all_gather(self, x: Tensor, counts: Sequence[int], label: str, options: str = "") -> list[Tensor]:
        return [x]
