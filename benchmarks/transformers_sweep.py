"""Every language model of the installed transformers, tiny, on 2 processes, against one process.

    python benchmarks/transformers_sweep.py --jobs 8 --json sweep.json    # 2 processes for each job
    python benchmarks/transformers_sweep.py --only llama gemma2           # some models, and a table
    python benchmarks/transformers_sweep.py --kind masked seq2seq         # encoders, and encoders with decoders
    python benchmarks/transformers_sweep.py --json sweep.json --table     # the table of results that exist, in Markdown

Random weights. The logits and the gradients of all parameters are compared with those of one process, with ``sdpa`` as
the reference where the model has it and ``eager`` where not. Differences are relative to the largest value. All is
computed in float64: where a model asks for float32 (norms, the softmax of eager attention, routers) it gets float64, in
one process and in two, since the rounding of float32 would hide errors.

Each model runs in processes of its own, with a time limit. ``--json`` appends one line for each model when it is done;
models that the file already has are not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

TOKENS, SOURCE_TOKENS, BATCH = 29, 37, 2  # 15 and 14 tokens on the two ranks; longer than windows and chunks
TOLERANCE = 1e-10
WORLD = 2
# Models that hand position_ids on to another, and do not name them; what describes the whole sequence in others.
HANDS_ON_POSITIONS = {"moss_transcribe_diarize"}
WHOLE = {"gemma4_unified": "mm_token_type_ids", "git": "token_type_ids"}
NOT_CAUSAL = {"cpmant"}  # each token sees those after it, with every config
WORST_FIRST = ["wrong", "failed", "not made", "refused", "exact"]


# -- in a worker -------------------------------------------------------------------------------------------------------


def logits_and_gradients(model: Any, inputs: dict[str, Any], weights: Any, cp: Any = None) -> Any:
    from ringspan.testing.float64 import Float64

    model.zero_grad(set_to_none=True)
    with Float64():
        logits = model(**inputs, use_cache=False).logits
        (logits * weights[..., : logits.shape[-1]]).sum().backward()
    if cp is not None:
        cp.sum_gradients(model.parameters())
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def compare(model_type: str, kind: str, layout: str) -> dict[str, Any]:
    """Run one model in one process and on all. Every worker does both, and compares its own tokens."""
    import torch
    from tiny_models import VOCABULARY, small_model

    import ringspan as rs
    from ringspan.integrations.transformers import prepare

    torch.set_default_dtype(torch.float64)
    try:
        model: Any = small_model(model_type, kind)
    except Exception as error:
        return {"result": "not made", "why": _one_line(error)}
    weights = torch.randn(BATCH, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(2)).double()
    reference = "sdpa" if model._supports_sdpa else "eager"
    whole = inputs_of(model, model_type, kind)
    try:
        model.set_attn_implementation(reference)
        # without position ids: those that the model makes itself are the right ones
        wanted, wanted_grads = logits_and_gradients(model, whole, weights)
    except Exception as error:
        return {"result": "not made", "why": f"one process: {_one_line(error)}"}
    if kind == "seq2seq":
        cp = rs.ContextParallel(None, rs.full(TOKENS, SOURCE_TOKENS), layout=layout, kv_layout=layout, timeout=60)
    else:
        mask = rs.full(TOKENS) if kind == "masked" or model_type in NOT_CAUSAL else rs.causal(TOKENS)
        cp = rs.ContextParallel(None, mask, layout=layout, timeout=60)
    try:
        prepare(model)
        with cp:
            mine = inputs_of(model, model_type, kind, cp)
            logits, grads = logits_and_gradients(model, mine, cp.shard(weights, dim=1), cp)
    except (rs.UnplannedAttention, rs.InputError) as error:
        return {"result": "refused", "why": _one_line(error)}
    except Exception as error:
        return {"result": "failed", "why": _one_line(error)}
    found = {"logits": _difference(logits, cp.shard(wanted, dim=1))}
    found["gradients"] = max(_difference(grads.get(name), x) for name, x in wanted_grads.items())
    is_exact = all(x <= TOLERANCE for x in found.values())
    row = {"result": "exact" if is_exact else "wrong", "reference": reference, **found}
    positions = [name for name in mine if name.endswith("position_ids")]
    if positions:
        for name in positions:
            mine.pop(name)
        row["without position_ids"] = without_positions(model, cp, mine, logits)
    return row


def inputs_of(model: Any, model_type: str, kind: str, cp: Any = None) -> dict[str, Any]:
    """Return the inputs of a model in one process, or with ``cp`` those of this rank, with position ids."""
    import torch
    from tiny_models import VOCABULARY

    from ringspan.integrations.transformers.refusals import first_position

    ids = torch.randint(2, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    source = torch.randint(2, VOCABULARY, (BATCH, SOURCE_TOKENS), generator=torch.Generator().manual_seed(3))
    sides = {"decoder_": (ids, "q"), "": (source, "kv")} if kind == "seq2seq" else {"": (ids, "q")}
    whole = {WHOLE[model_type]: torch.zeros_like(ids)} if model_type in WHOLE else {}
    if cp is None:
        return {**{f"{prefix}input_ids": x for prefix, (x, _) in sides.items()}, **whole}
    found: dict[str, Any] = whole
    accepted = signature(model.forward).parameters
    for prefix, (x, side) in sides.items():
        found[f"{prefix}input_ids"] = cp.shard(x, dim=1, of=side)
        if f"{prefix}position_ids" in accepted or model_type in HANDS_ON_POSITIONS:
            positions = cp.positions(side) + first_position(model.config)
            found[f"{prefix}position_ids"] = positions.expand(BATCH, -1)
    return found


def without_positions(model: Any, cp: Any, mine: dict[str, Any], logits: Any) -> str:
    """Return what happens to a user who does not pass position ids: an error, or the same logits, or wrong ones."""
    import torch

    import ringspan as rs

    try:
        with cp, torch.no_grad():
            found = model(**mine, use_cache=False).logits
    except rs.RingspanError:
        return "refused"
    return "exact" if _difference(found, logits) <= 1e-4 else "wrong"


def _difference(found: Any, wanted: Any) -> float:
    if found is None or found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    worst = ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)).item()
    return worst if worst == worst else float("inf")


def _one_line(error: Exception) -> str:
    name = type(error).__name__
    return ("" if name == "UnplannedAttention" else f"{name}: ") + " ".join(str(error).split())


# -- one model, in processes of its own --------------------------------------------------------------------------------


def run_one(model_type: str, kind: str, layout: str) -> dict[str, Any]:
    """Run a model on forked workers: they share the imports, which take longer than most models."""
    import torch
    import transformers
    from tiny_models import small_model  # noqa: F401

    import ringspan.integrations.transformers  # noqa: F401

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with tempfile.NamedTemporaryFile() as store:
        workers = [
            context.Process(target=_worker, args=(rank, store.name, model_type, kind, layout, results)) for rank in range(WORLD)
        ]
        for worker in workers:
            worker.start()
        both = [results.get() for _ in workers]
        for worker in workers:
            worker.join()
    row: dict[str, Any] = min(both, key=lambda found: WORST_FIRST.index(found["result"]))
    for key in ("logits", "gradients"):
        if key in row:
            row[key] = max(found.get(key, float("inf")) for found in both)
    return {"model": model_type, "kind": kind, **row, **versions}


def _worker(rank: int, store: str, model_type: str, kind: str, layout: str, results: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    try:
        results.put(compare(model_type, kind, layout))
    except Exception as error:
        results.put({"result": "failed", "why": _one_line(error)})
    results.close()
    results.join_thread()
    os._exit(0)  # a group cannot be destroyed if not all ranks made the same calls


# -- all models --------------------------------------------------------------------------------------------------------


def run_limited(model_type: str, kind: str, layout: str, limit: float) -> dict[str, Any]:
    """Run one model in a process of its own. It is ended, with its workers, after ``limit`` seconds."""
    command = [sys.executable, __file__, "--one", model_type, "--kind", kind, "--layout", layout]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"model": model_type, "kind": kind, "result": "failed", "why": f"not done after {limit:.0f} s"}
    lines = [line for line in printed.splitlines() if line.startswith('{"model"')]
    if not lines:
        return {"model": model_type, "kind": kind, "result": "failed", "why": " ".join(errors.split())[-300:]}
    return {**json.loads(lines[-1]), "seconds": round(time.perf_counter() - start, 1)}


def sweep(models: list[tuple[str, str]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run models, each a type and a kind."""
    rows = [row for row in read(options.json) if (row["model"], row["kind"]) in models and row["result"] not in options.again]
    done_before = {(row["model"], row["kind"]) for row in rows}
    left = [(*x, options.layout, options.limit) for x in models if x not in done_before]
    if options.json is not None and options.again:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ThreadPoolExecutor(options.jobs) as executor:
        for done in as_completed([executor.submit(run_limited, *x) for x in left]):
            row = done.result()
            rows.append(row)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{len(rows)}/{len(models)} {line_of(row)}", file=sys.stderr, flush=True)
    return rows


def read(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []


def line_of(row: dict[str, Any]) -> str:
    figures = f"{row['reference']} {row['logits']:.1e} {row['gradients']:.1e}" if "logits" in row else row["why"]
    if row.get("without position_ids") == "wrong":
        figures += ", wrong without position_ids"
    return f"{row['model']:28} {row['result']:10} {figures}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of the documentation: how many models have which result, and why."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["model"]):
        groups.setdefault(row["result"], []).append(row)
    text = ["| result | models |", "| --- | --- |", *(f"| {name} | {len(groups[name])} |" for name in groups)]
    exact = groups.get("exact", [])
    if exact:
        worst = max(max(row["logits"], row["gradients"]) for row in exact)
        text += ["", f"Largest difference: {worst:.1e}. Exact: " + ", ".join(f"`{row['model']}`" for row in exact)]
    others = [row for name, group in groups.items() if name != "exact" for row in group]
    text += ["", "| model | result | why |", "| --- | --- | --- |"]
    text += [f"| `{row['model']}` | {row['result']} | {row.get('why', line_of(row))} |" for row in others]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="model types, as in config.model_type")
    parser.add_argument("--kind", nargs="+", choices=("causal", "masked", "seq2seq"), default=["causal"], help="of model")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time; each has 2 processes of one thread")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each model")
    parser.add_argument("--json", type=Path, help="a file of one JSON line for each model; its models are not run again")
    parser.add_argument("--again", nargs="*", default=[], help="results in the file that are run again: failed, wrong, …")
    parser.add_argument("--table", action="store_true", help="only print the results in the file, in Markdown")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options.kind[0], options.layout)), flush=True)
        return
    if options.table:
        print(markdown(read(options.json)))
        return
    from tiny_models import KINDS

    models = [(x, kind) for kind in options.kind for x in KINDS[kind] if not options.only or x in options.only]
    rows = sweep(models, options)
    for row in rows:
        print(line_of(row))
    print(dict(Counter(row["result"] for row in rows)), file=sys.stderr)


if __name__ == "__main__":
    main()
