"""``ringspan plan``: choose layout and strategy for a mask on a machine, and show the costs as text or a report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ringspan.cli.argument_types import tokens
from ringspan.cli.console import show
from ringspan.cli.mask_argument import mask_at
from ringspan.cli.plan.facts import facts
from ringspan.cli.plan.page import page
from ringspan.cli.plan.png import check_drawable, draw
from ringspan.cli.plan.study import Question, study
from ringspan.cli.plan.text import candidates, fewer_ranks, shortened, summary
from ringspan.costs import Hardware, named_hardware
from ringspan.errors import InputError, PlanError
from ringspan.plans import Shape
from ringspan.plans.shape import ITEM_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """examples
  ringspan plan --mask "causal()" --seq-len 1M --world 64
  ringspan plan --mask "documents(file=lengths.txt) & window(4096)" --world 16 --hardware h100x8 --html report.html
  ringspan plan --mask "causal() & window(4096)" --seq-len 131072 --world 8 --layout contiguous --strategy exchange --rank 3

It needs no GPU, no tensors and no other processes: the machine is a model, and a plan is data."""
    what = parser.add_argument_group("attention")
    what.add_argument(
        "--mask",
        required=True,
        metavar="TEXT",
        help="as in Python: causal(), full(), window(LEFT), sliding_window(W), documents([700, 324]), "
        "documents(file=lengths.txt), prefix(N, P), chunked(N, C), tree(LENGTHS, PARENTS), joined by & | - ~ and brackets",
    )
    what.add_argument(
        "--seq-len",
        type=tokens,
        metavar="N",
        help="tokens, for masks that have no length of their own: 131072, 128K or 1M (= 1,048,576)",
    )
    what.add_argument("--heads", type=int, help="query heads (default 32)")
    what.add_argument("--kv-heads", type=int, help="key heads (default 8)")
    what.add_argument("--head-dim", type=int, default=128, help="head dim (default 128)")
    what.add_argument("--batch", type=int, default=1, help="batch size (default 1)")
    what.add_argument("--dtype", choices=[*ITEM_BYTES], default="bfloat16", help="dtype of the tensors (default bfloat16)")
    where = parser.add_argument_group("machine")
    where.add_argument("--world", type=int, required=True, metavar="P", help="ranks, one for each GPU")
    where.add_argument(
        "--hardware",
        default="h200x8",
        metavar="NAME",
        help="a100, h100, h200, b200 or cpu, with the ranks of a node after an x, or a .json file of your own (default h200x8)",
    )
    where.add_argument("--layout", default="auto", help="which rank owns which tokens (default: the fastest)")
    where.add_argument("--strategy", default="auto", help="what is communicated, and when (default: the fastest)")
    where.add_argument(
        "--cost-ranks",
        type=int,
        metavar="N",
        help="simulate this many ranks of the choice (default: all up to 512 ranks, a sample of more)",
    )
    show = parser.add_argument_group("output")
    show.add_argument("--rank", type=int, default=0, metavar="R", help="the rank whose steps to print (default 0)")
    show.add_argument("--all", action="store_true", help="simulate every candidate, also those that cannot be the fastest")
    show.add_argument("--json", action="store_true", help="one JSON object instead of text")
    show.add_argument("--html", type=Path, metavar="FILE", help="also write a report to open in a browser; needs no network")
    show.add_argument("--png", type=Path, metavar="FILE", help="also draw the mask and the timeline (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    question, notes = _question(args)
    if not 0 <= args.rank < question.world:
        raise PlanError(f"--rank must be one of 0 … {question.world - 1}, not {args.rank}")
    for path in (args.html, args.png):
        if path is not None and path.is_dir():
            raise InputError(f"cannot write {path}: it is a directory. Give the name of a file in it")
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"cannot write {path}: there is no directory {path.absolute().parent}. Make it first")
    if args.png is not None:
        check_drawable(args.png)
    found = study(question)
    results = facts(found)
    results["notes"] = [*notes, *results["notes"]]
    if args.html is not None:
        args.html.write_text(page(found, results), encoding="utf-8")
    if args.png is not None:
        draw(args.png, found)
    if args.json:
        print(json.dumps(results))
        return 0
    show(summary(results), candidates(results), "")
    if results["fewer_ranks"]:
        show(fewer_ranks(results), "")
    show(shortened(found.plans[0].at(args.rank).explain(found.question.shape)))
    for path in filter(None, (args.html, args.png)):
        show(f"\nwritten: {path}")
    return 0


def _question(args: argparse.Namespace) -> tuple[Question, tuple[str, ...]]:
    notes = []
    for name, assumed in (("heads", 32), ("kv_heads", 8)):
        if getattr(args, name) is None:
            setattr(args, name, assumed)
            notes.append(f"--{name.replace('_', '-')} was not given: {assumed} is assumed, also by strategies that split heads")
    for name in ("heads", "kv_heads", "head_dim", "batch", "world"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.heads % args.kv_heads:
        raise InputError(f"--heads {args.heads} cannot share --kv-heads {args.kv_heads}: give a multiple of the key heads")
    mask = mask_at(args.mask, args.seq_len)
    if not mask.area:
        raise InputError(f"{args.mask!r} hides every key from every query: there is nothing to plan")
    shape = Shape(heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim, batch=args.batch, dtype=args.dtype)
    question = Question(
        mask=mask,
        world=args.world,
        machine=_machine(args.hardware),
        shape=shape,
        layout=args.layout,
        strategy=args.strategy,
        most_ranks=args.cost_ranks,
        every_candidate=args.all,
        compare_fewer=True,
    )
    return question, tuple(notes)


def _machine(name: str) -> Hardware:
    try:
        return named_hardware(name)
    except PlanError as error:  # name the argument in the message
        raise PlanError(f"--hardware {name}: {error}") from None
