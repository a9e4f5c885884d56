"""What the handshake says, rank by rank. That every rank says it is shown with real processes in test_process_group.py."""

from __future__ import annotations

import pytest

from ringspan.transports import Hello, compare, digest_number
from ringspan.transports.handshake import NO_FUNCTION

HELLO = Hello(1, digest_number("11a0000000001234"), 2, 8, 4, 64, 64, 2, NO_FUNCTION, 10, 10)
ROWS = [(10, 10), (11, 9), (9, 11)]
FITTING = [HELLO, HELLO._replace(queries=11, keys=9), HELLO._replace(queries=9, keys=11)]


def test_ranks_that_agree() -> None:
    assert compare(FITTING, ROWS) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"digest": digest_number("f1a0000000004321")}, "plan 11a0000000001234, rank 2 with f1a0000000004321"),
        ({"heads": 16}, "heads 8, rank 2 with 16"),
        ({"kv_heads": 2}, "kv heads 4, rank 2 with 2"),
        ({"head_dim": 32}, "head dim 64, rank 2 with 32"),
        ({"dtype": 0}, "dtype float32, rank 2 with float16"),
        ({"score_mod": digest_number("11a0000000001234")}, "score_mod None, rank 2 with 11a0000000001234"),
        ({"batch": 1}, "batch 2, rank 2 with 1"),
        ({"version": 2}, "version 1, rank 2 with 2"),
        ({"version": -1}, "rank 2 came with q, k and v that do not go together"),
        ({"queries": 8}, "rank 2 came with 8 queries where the plan says 9"),
        ({"keys": 12}, "rank 2 came with 12 keys where the plan says 11"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_rank_and_the_thing_are_named(change: dict[str, int], said: str) -> None:
    everyone = [*FITTING[:2], FITTING[2]._replace(**change)]
    problem = compare(everyone, ROWS)
    assert problem is not None
    assert said in problem
