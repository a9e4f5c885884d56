"""Record what passes through a model: inputs and outputs of modules, and the tensors of attention calls.

Tensors are in the order of time, so that the code which makes the first wrong one lies between it and the one before::

    model input ► embed input ► embed output ► layers.0 input ► layers.0.qkv input ► layers.0.qkv output ► attention q, k, v
    ► attention out ► layers.0.out input ► layers.0.out output ► layers.0 output ► … ► model output
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.varlen import VarlenCall
from ringspan.torch_private.dynamo import without_compilation

Kind = Literal["module", "attention", "local attention", "softmax"]
NOT_INTERCEPTED = ("local attention", "softmax")
CALL = "call"  # the label of an empty tensor that stands for a call


class Key(NamedTuple):
    """A call in a run of the step, the same in another run: ``module`` is the path of the innermost module."""

    kind: Kind
    module: str
    nth: int

    def __str__(self) -> str:
        name = self.module or "(the model)"
        call = f" (call {self.nth + 1})" if self.nth else ""
        return f"{name}{call}" if self.kind == "module" else f"{self.kind} in {name}{call}"


Place = tuple[Key, str]
"""A tensor of a run: the call that it enters or leaves, and its label."""


@dataclass(slots=True)
class Trace:
    """The tensors of a run, and the gradient of the loss with respect to the last output of a module that has one."""

    tensors: dict[Place, Tensor] = field(default_factory=dict)
    last_gradient: tuple[Place, Tensor] | None = None
    calls: Counter[str] = field(default_factory=Counter)
    """How often methods of ContextParallel were called."""


class Recorder(TorchFunctionMode):
    """Records a run of a model into ``trace`` while its block is open.

    ``tokens`` are the numbers of queries and keys in this run: a softmax over a matrix of this shape is attention that
    is written by hand. With ``widen``, functions that are asked for float32 compute in float64.
    """

    def __init__(self, model: nn.Module, tokens: tuple[int, int], *, widen: bool) -> None:
        super().__init__()
        self.trace = Trace()
        self._model, self._tokens, self._widen = model, tokens, widen
        self._last_output = -1
        self._counts: Counter[tuple[Kind, str]] = Counter()
        self._open: list[Key] = []
        self._stack = ExitStack()

    # -- what subclasses change ----------------------------------------------------------------------------------------

    def passing(self, key: Key, labelled: dict[str, Any]) -> dict[str, Any]:
        """Record values that enter or leave a module or an attention call. Returns the values to go on with."""
        for label, tree in labelled.items():
            for name, x in leaves(tree, label):
                self.trace.tensors[key, name] = x.detach().clone()
                if label == "output" and x.requires_grad and x.ndim:
                    order = len(self.trace.tensors)
                    x.register_hook(lambda grad, order=order, name=name: self._keep_last(order, (key, name), grad))
        return labelled

    def _keep_last(self, order: int, place: Place, grad: Tensor) -> None:
        if order > self._last_output:
            self._last_output, self.trace.last_gradient = order, (place, grad.detach().clone())

    @property
    def has_calls(self) -> bool:
        """Whether a module of the model was called."""
        return bool(self._counts)

    # -- the block -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        for path, module in self._model.named_modules():
            before = module.register_forward_pre_hook(self._before(path), with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        self._stack.enter_context(_replaced(ContextParallel, self._methods()))
        self._stack.enter_context(without_compilation())  # compiled code does not call hooks that were added later
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stack.close()

    # -- modules -------------------------------------------------------------------------------------------------------

    def _before(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            key = self._new("module", path)
            self._open.append(key)
            given = self.passing(key, {"input": args, **{f"input {name}": x for name, x in kwargs.items()}})
            return given.pop("input"), {name.removeprefix("input "): x for name, x in given.items()}

        return hook

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        return self.passing(self._open.pop(), {"output": outputs})["output"]

    def _new(self, kind: Kind, path: str) -> Key:
        nth = self._counts[kind, path]
        self._counts[kind, path] += 1
        return Key(kind, path, nth)

    @property
    def _module(self) -> str:
        return self._open[-1].module if self._open else ""

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attention(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, call: Callable[..., Any]) -> Any:
        key = self._new(kind, self._module)
        given = self.passing(key, {"q": q, "k": k, "v": v})
        result = call(given["q"], given["k"], given["v"])
        out = result[0] if isinstance(result, tuple) else result
        out = self.passing(key, {"out": out})["out"]
        return (out, *result[1:]) if isinstance(result, tuple) else out

    def _methods(self) -> dict[str, Callable[..., Any]]:
        """Return methods that record a call and make it, to replace those of ContextParallel."""
        originals = {name: getattr(ContextParallel, name) for name in ("attention", "flex_attention", "varlen_attention")}

        def attention(cp: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            original = originals["attention"]
            return self._attention("attention", q, k, v, lambda q, k, v: original(cp, q, k, v, **options))

        def flex_attention(cp: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
            original = originals["flex_attention"]
            return self._attention("attention", query, key, value, lambda q, k, v: original(cp, q, k, v, *args, **options))

        def varlen_attention(cp: Any, call: VarlenCall) -> Any:
            original = originals["varlen_attention"]

            def compute(q: Tensor, k: Tensor, v: Tensor) -> Any:
                return original(cp, call._replace(query=q, key=k, value=v))

            return self._attention("attention", call.query, call.key, call.value, compute)

        counted = {name: self._counted(name) for name in ("sum_gradients", "unshard")}
        return {"attention": attention, "flex_attention": flex_attention, "varlen_attention": varlen_attention, **counted}

    def _counted(self, name: str) -> Callable[..., Any]:
        original = getattr(ContextParallel, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self.trace.calls[name] += 1
            return original(*args, **kwargs)

        return method

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record attention that no block has intercepted."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._local_attention(func, *args, **kwargs)
        if self._widen:
            func = Tensor.double if func is Tensor.float else func
            args = tuple(_wide(x) for x in args)
            kwargs = {key: _wide(x) for key, x in kwargs.items()}
        result = func(*args, **kwargs)
        if name == "softmax" and isinstance(result, Tensor) and tuple(result.shape[-2:]) == self._tokens:
            self.passing(self._new("softmax", self._module), {CALL: torch.empty(0)})
        if name == "multi_head_attention_forward":
            self.passing(self._new("local attention", self._module), {CALL: torch.empty(0)})
        return result

    def _local_attention(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._attention("local attention", query, key, value, lambda q, k, v: func(q, k, v, *args, **kwargs))


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


def leaves(tree: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers, each with a label. The label of a single one is ``label`` itself."""
    if isinstance(tree, Tensor):
        yield label, tree
    elif isinstance(tree, Mapping):
        for key, x in tree.items():
            yield from leaves(x, f"{label}.{key}")
    elif isinstance(tree, list | tuple):
        for i, x in enumerate(tree):
            yield from leaves(x, label if len(tree) == 1 else f"{label}.{i}")


@contextmanager
def _replaced(owner: type, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of a class while the context is open."""
    before = {name: vars(owner).get(name) for name in methods}  # None: the method of a base class
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name, original in before.items():
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
