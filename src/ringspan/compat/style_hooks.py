"""The hooks of torch's style: they turn a module's arguments into those of an attention function without a block.

ringspan's style does not use them. They serve code that registers them itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ringspan.compat.gather import flex_cp_allgather
from ringspan.errors import InputError

NAMES = ("query", "key", "value")


class StyleHooks:
    seq_dim: int

    def flex_input_fn(self, module: nn.Module | None, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        """Return the arguments with the keys and values of all ranks, in rank order, for a BlockMask that was sharded.

        They are the first three arguments, or have the names of ``flex_attention``. Each stays positional or named.
        """
        tensors = dict(zip(NAMES, args, strict=False)) | {name: kwargs[name] for name in NAMES if name in kwargs}
        for name in NAMES:
            if not isinstance(tensors.get(name), Tensor):
                raise InputError(f"{name} must be a tensor, not {type(tensors.get(name)).__name__}")
        name_of_group = mesh.get_group().group_name
        key, value = (tensors[name].contiguous() for name in ("key", "value"))
        tensors["key"], tensors["value"] = flex_cp_allgather(key, value, self.seq_dim, name_of_group)
        new_args = (*(tensors[name] for name in NAMES[: len(args)]), *args[len(NAMES) :])
        return new_args, {**kwargs, **{name: tensors[name] for name in NAMES[len(args) :]}}

    def sdpa_input_fn(
        self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with DTensors of ``Shard(seq_dim)`` for all tensors. Attention of them needs a block."""
        new_kwargs = {name: self._as_shard(x, mesh) for name, x in kwargs.items()}
        return tuple(self._as_shard(x, mesh) for x in args), new_kwargs

    def sdpa_output_fn(self, module: nn.Module | None, inputs: Any, outputs: Any, mesh: DeviceMesh) -> Any:
        """Return the local tensors of DTensors."""
        if isinstance(outputs, Tensor):
            return _local(outputs)
        return tuple(map(_local, outputs))

    def _as_shard(self, x: Any, mesh: DeviceMesh) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not isinstance(x, DTensor):
            return DTensor.from_local(x, mesh, [Shard(self.seq_dim)], run_check=False)
        if tuple(x.placements) != (Shard(self.seq_dim),):
            raise InputError(f"a DTensor argument is {tuple(x.placements)}, but must be Shard({self.seq_dim}): redistribute it")
        return x


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x
