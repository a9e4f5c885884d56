"""The loopback test of ``ringspan doctor``: attention of two processes on this machine, compared with dense
attention."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from ringspan.testing.workers import Pool, WorkerFailed

TOKENS = 64
LARGEST_ERROR = 1e-5  # in float32

# What the error of a worker contains -> what is wrong, in words.
CAUSES = (
    (
        "Unable to find address for",
        "GLOO_SOCKET_IFNAME={ifname} names no network interface of this machine: unset it, or set it to one of `ip link`",
    ),
    (
        "Unable to resolve hostname",
        "the name of this machine has no address: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME",
    ),
    ("Permission denied", "this process may not open sockets: a sandbox or a security policy forbids it"),
    ("Address already in use", "a port was taken meanwhile: try again"),
    (
        "did not finish in time",
        "two processes did not exchange a message within {timeout:.0f} s: a firewall may block 127.0.0.1, or the machine is "
        "overloaded: try --timeout {longer:.0f}",
    ),
    (
        "PeerTimeout",
        "a message did not arrive within the time limit: a firewall may block 127.0.0.1, or the machine is overloaded: try "
        "--timeout {longer:.0f}",
    ),
    ("PeerLost", "one of two processes ended early: see dmesg for the out-of-memory killer"),
    ("exit code -9", "one of two processes was killed: see dmesg for the out-of-memory killer"),
)


def try_loopback(timeout: float) -> dict[str, Any]:
    """Return whether two gloo processes on this machine can attend within ``timeout`` seconds, their start included, in
    words, and the seconds it took."""
    start = time.monotonic()
    if not dist.is_available() or not dist.is_gloo_available():
        return {"works": False, "text": "this PyTorch was built without gloo, so no processes can be tried", "seconds": 0.0}
    works = False
    try:
        with Pool(2, timeout=timeout) as pool:
            errors = pool.run(attend_and_compare, timeout / 2)
    except (WorkerFailed, RuntimeError, OSError) as error:
        text = explain(str(error), timeout)
    else:
        works = all(error < LARGEST_ERROR for error in errors)  # NaN is not
        worst = ", ".join(f"{error:.1e}" for error in errors)
        text = f"two gloo processes attended over {TOKENS} tokens; the largest errors of the ranks are {worst}"
        if not works:
            text = f"two gloo processes exchanged messages, but the results are wrong by {worst}: please report this"
    return {"works": works, "text": text, "seconds": time.monotonic() - start}


def attend_and_compare(rank: int, timeout: float) -> float:
    """Attend over two ranks and return the largest error of the result and of the gradients of this rank's tokens."""
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 2, TOKENS, 16, dtype=torch.float64)
    cp = rs.ContextParallel(None, rs.causal(TOKENS), strategy="ring", timeout=timeout)
    mine = [x.float().requires_grad_() for x in cp.shard(*whole, dim=2)]
    wanted = q, k, v = [x.requires_grad_() for x in whole.unbind()]
    out, expected = cp.attention(*mine), dense_attention(q, k, v, torch.from_numpy(cp.mask.dense())).out
    # Each query has another gradient: equal ones would hide an exchange of rows.
    weights = torch.randn(expected.shape, dtype=torch.float64)
    grads = torch.autograd.grad(out, mine, cp.shard(weights, dim=2).float())
    expected_grads = torch.autograd.grad(expected, wanted, weights)
    pairs = zip((out, *grads), cp.shard(expected.detach(), *expected_grads, dim=2), strict=True)
    return torch.stack([(x.detach() - y).abs().max() for x, y in pairs]).max().item()  # NaN if one is


def explain(error: str, timeout: float) -> str:
    """Return what is wrong in words, or the last line of the error."""
    for sign, cause in CAUSES:
        if sign in error:
            return cause.format(ifname=os.environ.get("GLOO_SOCKET_IFNAME", ""), timeout=timeout, longer=5 * timeout)
    lines = error.strip().splitlines()
    return f"two gloo processes could not attend: {lines[-1] if lines else 'without a message'}"
