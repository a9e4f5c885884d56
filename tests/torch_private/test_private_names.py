"""The private names of PyTorch and FlashAttention-4 that ringspan uses: one test for each reports if it is gone.

The first test imports nothing of ringspan, so it also reports a name whose absence breaks ``import ringspan``
(``pytest --noconftest tests/torch_private/test_private_names.py``).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple

import pytest
import torch


class Use(NamedTuple):
    module: str  # of ringspan.torch_private
    purpose: str


ATEN = "torch.ops.aten"
USES = {
    # modes
    "torch._C.DisableTorchFunction": Use("function_modes", "run a rank's kernels without the block around the call"),
    "torch._C.DisableTorchFunctionSubclass": Use("function_modes", "find out which indices a mask_mod reads"),
    "torch._C._EnableTorchFunction": Use("function_modes", "observe a user's function inside a kernel, where modes are off"),
    "torch._C._len_torch_function_stack": Use("function_modes", "look for a block on the stack of modes"),
    "torch._C._get_function_stack_at": Use("function_modes", "look for a block on the stack of modes"),
    "torch._C._push_on_torch_function_stack": Use("function_modes", "local_attention: put blocks back on the stack"),
    "torch._C._pop_torch_function_stack": Use("function_modes", "local_attention: take blocks off the stack"),
    "torch.utils._device.DeviceContext": Use("function_modes", "local_attention: leave the default device at the bottom"),
    "torch._C._len_torch_dispatch_stack": Use("dispatch_modes", "attend as an operator only under a dispatch mode"),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": Use("dispatch_modes", "recognise CommDebugMode"),
    "torch.utils._python_dispatch.TorchDispatchMode": Use("dispatch_modes", "record what a pass does"),
    "torch.utils._python_dispatch._disable_current_modes": Use("dispatch_modes", "find a plan under FakeTensorMode"),
    "torch.utils.flop_counter._FlopCounterMode": Use("dispatch_modes", "count the pairs of a rank in FlopCounterMode"),
    "torch._C._dispatch_tls_local_include_set": Use("dispatch_keys", "call a user's score_mod inside an operator"),
    "torch._C._dispatch_tls_local_exclude_set": Use("dispatch_keys", "call a user's score_mod inside an operator"),
    "torch._C._ForceDispatchKeyGuard": Use("dispatch_keys", "call a user's score_mod inside an operator"),
    "torch.ScriptFunction.__call__": Use("script_calls", "refuse attention in TorchScript, which no mode can see"),
    "torch.ScriptMethod.__call__": Use("script_calls", "refuse attention in TorchScript, which no mode can see"),
    # the compiler
    "torch._dynamo.config.patch": Use("dynamo", "compile the flex kernel for more shapes than Dynamo's limit"),
    "torch._dynamo.disable": Use("dynamo, flex_interception", "run planning and intercepted flex_attention eagerly"),
    "torch.fx.experimental._config.patch": Use("symbolic_shapes", "one compiled flex kernel for all lengths"),
    "torch._check": Use("symbolic_shapes", "tell the compiler which lengths are equal in the flex kernel"),
    "torch._ops.HigherOrderOperator": Use("higher_order", "keep the block open in the branches of torch.cond"),
    "torch.ops.aten.add_.Tensor._schema": Use("operator_schemas", "which arguments of an operator a pass writes to"),
    # tensors and modules
    "torch.autograd.graph.Node._input_metadata": Use("autograd_nodes", "strict mode: the shapes of attention in a graph"),
    "torch.Tensor._version": Use("tensor_version", "plan again when a tensor that a mask uses was changed in place"),
    "torch.nn.Module()._parameters": Use("module_tables", "tell whether two score_mods that are modules are the same"),
    "torch.nn.Module()._buffers": Use("module_tables", "tell whether two score_mods that are modules are the same"),
    "torch.nn.Module()._modules": Use("module_tables", "tell whether two score_mods that are modules are the same"),
    "torch.utils._pytree.tree_flatten": Use("pytree", "compat: shard nested buffers"),
    "torch.utils._pytree.tree_unflatten": Use("pytree", "compat: shard nested buffers"),
    "torch.utils._pytree.tree_map": Use("pytree", "compat: results of nested containers"),
    "torch.utils._pytree.tree_map_with_path": Use("pytree", "cp.shard of nested containers"),
    "torch.utils._pytree.keystr": Use("pytree", "the place of a tensor in a container, in errors of cp.shard"),
    "torch.utils._pytree.tree_map_only": Use("pytree", "differentiate a score_mod in the tensors that it captured"),
    "torch.utils._pytree.tree_leaves": Use("pytree", "find the tensors that a function captured"),
    # processes, streams, profilers
    "torch._C._distributed_c10d._resolve_process_group": Use("process_groups", "compat: flex_cp_allgather by group name"),
    "torch.testing._internal.distributed.fake_pg.FakeStore": Use("process_groups", "bench: PyTorch's own context_parallel"),
    "torch.distributed._local_tensor.maybe_run_for_local_tensor": Use("process_groups", "compat: simulated ranks"),
    "torch._C._cuda_getCurrentRawStream": Use("cuda_streams", "keep cached tensors of one stream from another"),
    "torch._C._cuda_endAllocateToPool": Use("cuda_graphs", "go on after CUDA has invalidated the capture of a pass"),
    "torch._foreach_copy_": Use("cuda_graphs", "copy the inputs of a captured pass with one launch"),
    "torch.autograd._profiler_enabled": Use("profiler", "name the steps of a plan in a profiler's trace"),
    # checkpoints
    "torch._C._autograd._top_saved_tensors_default_hooks": Use("checkpoints", "find the checkpoints around a call"),
    "torch._C._autograd._push_saved_tensors_default_hooks": Use("checkpoints", "find the checkpoints around a call"),
    "torch._C._autograd._pop_saved_tensors_default_hooks": Use("checkpoints", "find the checkpoints around a call"),
    "torch._C._current_graph_task_id": Use("checkpoints", "tell attention that is recomputed in a block from a first call"),
    "torch.utils.checkpoint._checkpoint_hook": Use("checkpoints", "enter blocks again when attention is recomputed"),
    # attention
    f"{ATEN}._flash_attention_forward": Use("attention_operators", 'backend="flash"'),
    f"{ATEN}._flash_attention_backward": Use("attention_operators", 'backend="flash"'),
    f"{ATEN}._scaled_dot_product_flash_attention_for_cpu": Use("attention_operators", 'backend="cpu"'),
    f"{ATEN}._scaled_dot_product_flash_attention_for_cpu_backward": Use("attention_operators", 'backend="cpu"'),
    f"{ATEN}._scaled_dot_product_cudnn_attention": Use("attention_operators", 'backend="cudnn"'),
    f"{ATEN}._scaled_dot_product_cudnn_attention_backward": Use("attention_operators", 'backend="cudnn"'),
    f"{ATEN}._scaled_dot_product_efficient_attention": Use("attention_operators", 'backend="efficient"'),
    f"{ATEN}._scaled_dot_product_efficient_attention_backward": Use("attention_operators", 'backend="efficient"'),
    f"{ATEN}._scaled_dot_product_flash_attention": Use("attention_operators", "rs.activate overrides it"),
    f"{ATEN}._scaled_dot_product_flash_attention_backward": Use("attention_operators", "rs.activate overrides it"),
    "torch._native_multi_head_attention": Use("attention_operators", "a block refuses it"),
    "torch._transformer_encoder_layer_fwd": Use("attention_operators", "a block refuses it"),
    "torch.nn.attention.varlen._varlen_attn": Use("attention_operators", "varlen_attn in a block"),
    "torch.nn.attention.varlen._varlen_attn_out": Use("attention_operators", "a block refuses it"),
    "flash_attn.cute.interface._flash_attn_fwd": Use("flash_attention_4", 'backend="fa4"'),
    "flash_attn.cute.interface._flash_attn_bwd": Use("flash_attention_4", 'backend="fa4"'),
    "flash_attn.cute.interface._flash_attn_fwd.compile_cache": Use("flash_attention_4", "record launches"),
    "flash_attn.cute.interface._flash_attn_bwd.compile_cache": Use("flash_attention_4", "record launches"),
    "flash_attn.cute.interface._bwd_preprocess.compile_cache": Use("flash_attention_4", "record launches"),
    "flash_attn.cute.interface._bwd_postprocess_convert.compile_cache": Use("flash_attention_4", "record launches"),
    "flash_attn.cute.interface._compute_tile_cumsum.compile_cache": Use("flash_attention_4", "record launches"),
}

# Names that are not in every installation, and where they are.
ONLY_WHERE = {
    "torch._C._cuda_endAllocateToPool": (torch.version.cuda is not None, "a build of PyTorch with CUDA"),
    "torch._C._cuda_getCurrentRawStream": (torch.version.cuda is not None, "a build of PyTorch with CUDA"),
    # ringspan does without it: ranks are then not simulated.
    "torch.distributed._local_tensor.maybe_run_for_local_tensor": (
        importlib.util.find_spec("torch.distributed._local_tensor") is not None,
        "a PyTorch with LocalTensor",
    ),
    "torch.nn.attention.varlen._varlen_attn_out": (
        hasattr(importlib.import_module("torch.nn.attention.varlen"), "varlen_attn_out"),
        "torch 2.12",
    ),
    **{
        name: (importlib.util.find_spec("flash_attn") is not None, "flash-attn-4")
        for name in USES
        if name.startswith("flash_attn.")
    },
}


def find(name: str) -> Any:
    """The object of a dotted name. Of a class that is called, ``nn.Module()``, an instance is meant."""
    found: Any = importlib.import_module(name.split(".", maxsplit=1)[0])
    path = name.split(".", maxsplit=1)[0]
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        called = part.endswith("()")
        if not hasattr(found, part.removesuffix("()")):
            importlib.import_module(path)
        found = getattr(found, part.removesuffix("()"))
        found = found() if called else found
    return found


@pytest.mark.parametrize(("name", "use"), USES.items(), ids=USES)
def test_a_private_name_is_where_ringspan_expects_it(name: str, use: Use) -> None:
    is_here, needs = ONLY_WHERE.get(name, (True, ""))
    if not is_here:
        pytest.skip(f"needs {needs}")
    try:
        find(name)
    except (AttributeError, ImportError) as error:
        pytest.fail(
            f"{name} is gone from torch {torch.__version__} ({error}). ringspan/torch_private/ uses it in {use.module}.py to: "
            f"{use.purpose}. Find its successor, and bind that to the same public name there",
            pytrace=False,
        )


def test_a_name_that_is_gone_is_reported() -> None:
    for name in ("torch._C._no_such_function", "torch.no_such_module._function", "torch.ops.aten._no_such_operator"):
        with pytest.raises((AttributeError, ImportError)):
            find(name)


def test_the_mark_of_constant_functions_is_pytorchs() -> None:
    from ringspan.torch_private.dynamo import dynamo_constant

    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(dynamo_constant(lambda: None)) == vars(marked) == {"_dynamo_marked_constant": True}


def test_every_private_name_of_the_package_is_in_the_table() -> None:
    from tests.torch_private.private_names import ROOT, private_names

    known = {*USES, "_dynamo_marked_constant"}  # which has a test of its own
    missing = [
        f"{path.name}:{line}: {name}"
        for path in sorted((ROOT / "torch_private").glob("*.py"))
        for line, name in private_names(path.read_text(encoding="utf-8"))
        if not any(entry == name or entry.endswith(f".{name}") or entry.startswith(f"{name}.") for entry in known)
    ]
    assert missing == []


def test_every_name_of_the_table_is_used_where_it_says() -> None:
    from tests.torch_private.private_names import ROOT

    for name, use in USES.items():
        last = name.split(".")[-1]
        for module in use.module.split(", "):
            source = (ROOT / "torch_private" / f"{module}.py").read_text(encoding="utf-8")
            assert last in source, f"{module}.py does not use {name}"
