"""Comparing rank signatures. That every rank raises the same error is tested in test_process_group.py."""

from __future__ import annotations

import pytest

from ringspan.transports import RankSignature, digest_as_int64, first_disagreement
from ringspan.transports.handshake import NO_SCORE_MOD

FIRST = RankSignature(1, digest_as_int64("11a0000000001234"), 2, 8, 4, 64, 64, 2, NO_SCORE_MOD, 10, 10)
LENGTHS = [(10, 10), (11, 9), (9, 11)]
SIGNATURES = [FIRST, FIRST._replace(queries=11, keys=9), FIRST._replace(queries=9, keys=11)]


def test_ranks_that_agree() -> None:
    assert first_disagreement(SIGNATURES, LENGTHS) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fitted_digest": digest_as_int64("f1a0000000004321")}, "plan 11a0000000001234, rank 2 has f1a0000000004321"),
        ({"heads": 16}, "heads 8, rank 2 has 16"),
        ({"kv_heads": 2}, "kv heads 4, rank 2 has 2"),
        ({"head_dim": 32}, "head dim 64, rank 2 has 32"),
        ({"dtype": 0}, "dtype float32, rank 2 has float16"),
        ({"score_mod": digest_as_int64("11a0000000001234")}, "score_mod None, rank 2 has 11a0000000001234"),
        ({"batch": 1}, "batch 2, rank 2 has 1"),
        ({"version": 2}, "version 1, rank 2 has 2"),
        ({"queries": 8}, "rank 2 has 8 queries where the plan says 9"),
        ({"keys": 12}, "rank 2 has 12 keys where the plan says 11"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_message_names_the_rank_and_the_field(change: dict[str, int], message: str) -> None:
    problem = first_disagreement([*SIGNATURES[:2], SIGNATURES[2]._replace(**change)], LENGTHS)
    assert problem is not None
    assert message in problem
