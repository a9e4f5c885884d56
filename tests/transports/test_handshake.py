"""What the handshake says, rank by rank. That every rank says it is shown with real processes in test_process_group.py."""

from __future__ import annotations

import pytest

from ringspan.transports import RankSignature, digest_as_int64, first_disagreement
from ringspan.transports.handshake import NO_SCORE_MOD

SIGNATURE = RankSignature(1, digest_as_int64("11a0000000001234"), 2, 8, 4, 64, 64, 2, NO_SCORE_MOD, 10, 10)
ROWS = [(10, 10), (11, 9), (9, 11)]
FITTING = [SIGNATURE, SIGNATURE._replace(queries=11, keys=9), SIGNATURE._replace(queries=9, keys=11)]


def test_ranks_that_agree() -> None:
    assert first_disagreement(FITTING, ROWS) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"digest": digest_as_int64("f1a0000000004321")}, "plan 11a0000000001234, rank 2 has f1a0000000004321"),
        ({"heads": 16}, "heads 8, rank 2 has 16"),
        ({"kv_heads": 2}, "kv heads 4, rank 2 has 2"),
        ({"head_dim": 32}, "head dim 64, rank 2 has 32"),
        ({"dtype": 0}, "dtype float32, rank 2 has float16"),
        ({"score_mod": digest_as_int64("11a0000000001234")}, "score_mod None, rank 2 has 11a0000000001234"),
        ({"batch": 1}, "batch 2, rank 2 has 1"),
        ({"version": 2}, "version 1, rank 2 has 2"),
        ({"version": -1}, "rank 2 was called with invalid q, k and v"),
        ({"queries": 8}, "rank 2 has 8 queries where the plan says 9"),
        ({"keys": 12}, "rank 2 has 12 keys where the plan says 11"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_rank_and_the_thing_are_named(change: dict[str, int], said: str) -> None:
    everyone = [*FITTING[:2], FITTING[2]._replace(**change)]
    problem = first_disagreement(everyone, ROWS)
    assert problem is not None
    assert said in problem
