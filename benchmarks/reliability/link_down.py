"""Two hosts, as network namespaces joined by a virtual link: the link is taken down for good, and for four seconds.

    python -m benchmarks.reliability.link_down [--trials N] [--jobs N]

Needs Linux, ``ip`` and the right to make user namespaces (``unshare -rn``). One rank runs in each namespace, and the
store with rank 0. Both attend in a loop. A link that is down for good is an error on both ranks at the time limit of 8
s. One that comes back after 4 s is none.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

from benchmarks.reliability.experiments import Experiment, Rows, main_of, parser_of

LIMIT, LOOP_SECONDS = 8.0, 9.0
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def rank_program(rank: int) -> None:
    """Attend until the time is over, and print how it ended."""
    import torch
    import torch.distributed as dist

    import ringspan as rs

    os.environ["GLOO_SOCKET_IFNAME"] = f"veth{rank}"
    torch.set_num_threads(1)
    wait = timedelta(seconds=120)
    store = dist.TCPStore(ADDRESSES[0], 29511, 2, is_master=rank == 0, timeout=wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    cp = rs.ContextParallel(None, rs.causal(64), strategy="ring", timeout=LIMIT)
    q = cp.shard(torch.randn(1, 1, 64, 8), dim=2)
    cp.attention(q, q, q)
    print("ready", flush=True)
    start, longest = time.monotonic(), 0.0
    try:
        while True:
            begun = time.monotonic()
            more = cp.mean(torch.tensor([float(time.monotonic() - start < LOOP_SECONDS)]))
            cp.attention(q, q, q)
            longest = max(longest, time.monotonic() - begun)
            if more < 1:
                break
            time.sleep(0.02)
        print(json.dumps({"error": "", "seconds": longest}), flush=True)
    except rs.RingspanError as error:
        print(json.dumps({"error": type(error).__name__, "seconds": time.monotonic() - begun, "text": str(error)}), flush=True)
    os._exit(0)


def inside(down_seconds: float) -> None:
    """In a user and network namespace: make the second namespace and the link, run both ranks, take the link down."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    holder = subprocess.Popen(["unshare", "-n", "sleep", "600"])
    time.sleep(0.5)
    enter = ["nsenter", "-t", str(holder.pid), "-n"]
    ip("link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    ip("link", "set", "veth1", "netns", str(holder.pid))
    ip("addr", "add", f"{ADDRESSES[0]}/24", "dev", "veth0")
    for name in ("lo", "veth0"):
        ip("link", "set", name, "up")
    for words in (
        ["addr", "add", f"{ADDRESSES[1]}/24", "dev", "veth1"],
        ["link", "set", "lo", "up"],
        ["link", "set", "veth1", "up"],
    ):
        subprocess.run([*enter, "ip", *words], check=True)
    command = [sys.executable, "-m", "benchmarks.reliability.link_down", "--rank"]
    ranks = [
        subprocess.Popen([*prefix, *command, str(r)], stdout=subprocess.PIPE, text=True) for r, prefix in enumerate(([], enter))
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(1.0)
        ip("link", "set", "veth0", "down")
        if down_seconds:
            time.sleep(down_seconds)
            ip("link", "set", "veth0", "up")
        print(json.dumps([json.loads(process.communicate(timeout=90)[0]) for process in ranks]))
    finally:
        for process in (*ranks, holder):
            process.kill()


def run(down_seconds: float) -> list[dict[str, Any]] | None:
    command = ["unshare", "-rn", sys.executable, "-m", "benchmarks.reliability.link_down", "--inside", str(down_seconds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
        return None
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def trial(name: str, down_seconds: float, deadline: float) -> list[tuple[str, int, dict[str, Any]]]:
    reports = run(down_seconds) or [{"error": "not run", "seconds": 0.0}] * 2
    return [(name, rank, found) for rank, found in enumerate(reports)]


def rows_of(found: list[tuple[str, int, dict[str, Any]]]) -> Rows:
    rows: Rows = []
    for name, rank, x in sorted(found, key=lambda entry: entry[:2]):
        error, seconds = str(x["error"]) or "none", f"{x['seconds']:.1f}"
        rows.append({"case": name, "rank": rank, "error": error, "seconds of the longest wait": seconds})
    return rows


def experiment(trials: int) -> Experiment:
    reason = ""
    if not shutil.which("unshare") or not shutil.which("ip"):
        reason = "there is no unshare, or no ip"
    elif subprocess.run(["unshare", "-rn", "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        reason = "this machine does not allow network namespaces (unshare -rn)"
    cases = (("link down for good", 0.0), ("link down for 4 s", 4.0))
    tasks = [] if reason else [partial(trial, *case) for case in cases for _ in range(trials)]
    return Experiment(name="link down", tasks=tasks, rows=rows_of, goal=2 * len(tasks), skipped=reason)


def main() -> None:
    parser = parser_of(__doc__, 3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--inside", type=float)
    args = parser.parse_args()
    if args.rank is not None:
        rank_program(args.rank)
    elif args.inside is not None:
        inside(args.inside)
    else:
        main_of([experiment(args.trials)], args)


if __name__ == "__main__":
    main()
