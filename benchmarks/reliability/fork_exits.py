"""Run a program many times, as two ranks, in processes that are forked after the imports. Used by ``exits``.

    python -m benchmarks.reliability.fork_exits PROGRAM TRIALS DEADLINE

A forked process runs the program in the namespace of ``__main__`` and then ends as any interpreter does. Prints the
exit codes of each trial as a line of JSON. Forking saves the imports, which take longer than the programs.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

HANG_SECONDS = 150.0
# Packages that some programs need.
OPTIONAL = ("transformers", "trl")
IMPORTS = ("torch._dynamo", "torch.distributed.tensor", "torch.nn.attention.flex_attention", "ringspan")


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    return {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def exit_code(pid: int) -> int:
    """Wait for a process. Its exit code, or the negative number of the signal that ended it."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def fork_ranks(program: Path, trials: int, deadline: float, world: int = 2) -> bool:
    """Fork the ranks of each trial. Returns True in a forked process, which is to run the program."""
    for _ in range(trials):
        if time.monotonic() > deadline:
            break
        port, errors, pids = free_port(), tempfile.TemporaryFile(), []  # noqa: SIM115
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment(rank, world, port))
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(errors.fileno(), 2)
                errors.close()
                sys.argv = [str(program)]
                return True
            pids.append(pid)
        codes = [exit_code(pid) for pid in pids]
        if any(codes):
            errors.seek(0)
            print(f"{program.name}: {codes}: {errors.read().decode()[-600:]}", file=sys.stderr)
        errors.close()
        print(json.dumps(codes), flush=True)
    return False


if __name__ == "__main__":
    _program = Path(sys.argv[1])
    _text = _program.read_text(encoding="utf-8")
    for _name in (*IMPORTS, *(name for name in OPTIONAL if f"from {name} import" in _text)):
        importlib.import_module(_name)
    for _line in re.findall(r"^from (?:trl|transformers|datasets|ringspan\.\S+) import .*", _text, re.MULTILINE):
        exec(_line)  # these packages import their parts at the first use
    if fork_ranks(_program, int(sys.argv[2]), float(sys.argv[3])):
        exec(compile(_text, _program, "exec"), globals())
