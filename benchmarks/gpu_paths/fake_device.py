"""A device in host memory: its tensors are known from the host's, and what makes the host wait for it is counted.

Its name in torch is "meta", which computes nothing by itself: every operation on its tensors is done here, on the
values that they stand for. Kernels of Triton's interpreter are given the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NAME, HOST = torch.device("meta"), torch.device("cpu")
_aten = torch.ops.aten
# Their results, or the sizes of them, are numbers on the host.
_WAITING = {
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten._unique2.default,
}


class DeviceTensor(torch.Tensor):
    """Stands for a tensor of the device, whose values are those of a tensor on the host."""

    held: torch.Tensor  # the values

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> DeviceTensor:
        found: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=NAME
        )
        found.held = values
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} on a tensor of the fake device, outside of it")

    def tolist(self) -> Any:
        """Returns the values, by a copy to the host: torch has no other way for such tensors."""
        return self.cpu().tolist()


class FakeDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Is entered where the device is used; counts, by operation, what waits for it or copies to and from it."""

    def __init__(self, *kernels: tuple[ModuleType, str]) -> None:
        """Takes (module, name) of each Triton kernel that is launched."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()
        self._kernels = kernels

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that was computed on the device: nothing is counted."""
        return DeviceTensor(values)

    def __enter__(self) -> Self:
        self._before = [vars(module)[name] for module, name in self._kernels]
        for (module, name), kernel in zip(self._kernels, self._before, strict=True):
            vars(module)[name] = _Kernel(kernel)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for (module, name), kernel in zip(self._kernels, self._before, strict=True):
            vars(module)[name] = kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        on_device = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor)]
        target = kwargs.get("device")  # None: that of the arguments
        if target == NAME:
            kwargs["device"] = HOST
        elif not on_device:
            return func(*args, **kwargs)
        is_down = target == HOST or (func is _aten.copy_.default and not isinstance(args[0], DeviceTensor))
        if func is _aten.copy_.default:
            is_up = not isinstance(args[1], DeviceTensor)
        else:
            is_up = func is _aten._to_copy.default and not on_device
        waits = func in _WAITING or (func is _aten.index.Tensor and _has_mask(args[1]))
        if is_up or is_down or waits:
            self.counts["upload" if is_up else "download" if is_down else str(func)] += 1
        found = func(*_values(args), **_values(kwargs))
        if is_down:
            return args[0] if func is _aten.copy_.default else found
        changed = {id(each.held): each for each in on_device}  # in place

        def wrap(each: torch.Tensor) -> torch.Tensor:
            return changed[id(each)] if id(each) in changed else DeviceTensor(each)

        return tree_map_only(torch.Tensor, wrap, found)


class _Kernel:
    """Launches an interpreted kernel with the values of its tensors."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            values = [each.held if isinstance(each, DeviceTensor) else each for each in arguments]
            self._kernel[grid](*values, **options)

        return launch


def _values(arguments: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda each: each.held, arguments)


def _has_mask(indices: Any) -> bool:
    return any(each is not None and each.dtype == torch.bool for each in indices)
