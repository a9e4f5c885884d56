"""Comparing rank signatures. That every rank raises the same error is tested in test_process_group.py."""

from __future__ import annotations

import pytest

from ringspan.transports import RankSignature, digest_as_int64, first_disagreement
from ringspan.transports.handshake import NO_SCORE_MOD, plan_disagreement, ranks_by_value

RELEASE, OTHER = (int.from_bytes(text, "big") for text in (b"0.1.0", b"0.2.0"))
FIRST = RankSignature(RELEASE, digest_as_int64("11a0000000001234"), 2, 8, 4, 64, 64, 2, NO_SCORE_MOD, 10, 10)
LENGTHS = [(10, 10), (11, 9), (9, 11)]
SIGNATURES = [FIRST, FIRST._replace(queries=11, keys=9), FIRST._replace(queries=9, keys=11)]


def test_ranks_that_agree() -> None:
    assert first_disagreement(SIGNATURES, LENGTHS) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"fitted_digest": digest_as_int64("f1a0000000004321")},
            "ranks 0 and 1 have plan 11a0000000001234, rank 2 has plan f1a0000000004321",
        ),
        ({"heads": 16}, "heads 8, rank 2 has heads 16"),
        ({"kv_heads": 2}, "kv heads 4, rank 2 has kv heads 2"),
        ({"head_dim": 32}, "head dim 64, rank 2 has head dim 32"),
        ({"dtype": 0}, "dtype float32, rank 2 has dtype float16"),
        ({"score_mod": digest_as_int64("11a0000000001234")}, "score_mod None, rank 2 has score_mod 11a0000000001234"),
        ({"batch": 1}, "batch 2, rank 2 has batch 1"),
        ({"version": OTHER}, "different releases of ringspan (ranks 0 and 1 have 0.1.0, rank 2 has 0.2.0)"),
        ({"queries": 8}, "rank 2 has 8 queries where the plan says 9"),
        ({"keys": 12}, "rank 2 has 12 keys where the plan says 11"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_message_names_the_rank_and_the_field(change: dict[str, int], message: str) -> None:
    problem = first_disagreement([*SIGNATURES[:2], SIGNATURES[2]._replace(**change)], LENGTHS)
    assert problem is not None
    assert message in problem


def test_the_odd_ranks_are_named_last_whichever_they_are() -> None:
    assert ranks_by_value(["a", "b", "b", "b"]) == "ranks 1, 2 and 3 have b, rank 0 has a"
    assert ranks_by_value(["a"] * 20 + ["b"]) == "ranks 0, 1, 2, 3, 4, 5, 6 and 13 more have a, rank 20 has b"
    assert ranks_by_value([str(n) for n in range(10)]).endswith("rank 7 has 7, and 2 more values")


def test_the_parts_of_the_plan_that_differ_are_named() -> None:
    same = {"mask": "11 (documents)", "layout": "22 (zigzag)", "strategy": "ring", "plan": "33"}
    problem = plan_disagreement([same, {**same, "mask": "44 (documents)", "plan": "55"}, same])
    assert problem.startswith(
        "the ranks disagree on the mask: ranks 0 and 2 have 11 (documents), rank 1 has 44 (documents). All ranks must make "
    )
    assert "on the plan: rank 0 has 33, rank 1 has 55" in plan_disagreement([same, {**same, "plan": "55"}])
    assert "on the layout: rank 0 has 22 (zigzag), rank 1 has 66, and on the mask" not in plan_disagreement([same, same])
