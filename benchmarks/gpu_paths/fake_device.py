"""A device in host memory: its tensors are known from the host's, and what the host asks of it is counted.

Its name in torch is "meta", which computes nothing by itself: every operation on its tensors is done here, on the
values that they stand for. Kernels of Triton's interpreter are given the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.gpu_check.step import CallCounter

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
_COPYING = {_aten.copy_.default, _aten._to_copy.default}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
Kernels = Iterable[tuple[ModuleType, str]]  # (module, name) of each Triton kernel that is launched


class DeviceTensor(torch.Tensor):
    """Stands for a tensor of the device, whose values are those of a tensor on the host."""

    held: torch.Tensor  # the values

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(False):  # whose tensors cannot be views of such ones
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

    def data_ptr(self) -> int:
        """Returns the address of the values."""
        return self.held.data_ptr()


class FakeDevice(CallCounter):
    """Is entered where the device is used; counts calls of the dispatcher, launches of kernels and, in `counts` by
    operation, what waits for the device or copies to or from it."""

    def __init__(self, kernels: Kernels, *, is_computing: bool = True) -> None:
        """With `is_computing` off kernels are launched and compute nothing."""
        super().__init__()
        self.counts = Counter[str]()
        self.num_launches = 0
        self._kernels = tuple(kernels)
        self._is_computing = is_computing
        self._functions = _Functions(self)

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that is on the device: nothing is counted."""
        return DeviceTensor(values)

    def __enter__(self) -> Self:
        self._before = [vars(module)[name] for module, name in self._kernels]
        for (module, name), kernel in zip(self._kernels, self._before, strict=True):
            vars(module)[name] = _Kernel(self, kernel if self._is_computing else None)
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*exc)  # type: ignore[no-untyped-call]
        for (module, name), kernel in zip(self._kernels, self._before, strict=True):
            vars(module)[name] = kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = [each for each in tensors if isinstance(each, DeviceTensor)]
        assert len(on_device) == sum(each.device == NAME for each in tensors), "a tensor without values"
        target = kwargs.get("device")  # None: that of the arguments
        if target == NAME:
            kwargs["device"] = HOST
        elif not on_device:
            return super().__torch_dispatch__(func, types, args, kwargs)
        is_down = target == HOST or (func is _aten.copy_.default and not isinstance(args[0], DeviceTensor))
        on_host = [each for each in tensors if not isinstance(each, DeviceTensor)]
        # A single number goes with a launch; indices on the host are copied before it.
        is_up = not is_down and any(func in _COPYING or each.dim() for each in on_host)
        waits = func in _WAITING or (func is _aten.index.Tensor and _has_mask(args[1]))
        if is_up or is_down or waits:
            self.counts["upload" if is_up else "download" if is_down else str(func)] += 1
        found = super().__torch_dispatch__(func, types, _values(args), _values(kwargs))
        if is_down:
            return args[0] if func is _aten.copy_.default else found
        changed = {id(each.held): each for each in on_device}  # in place

        def wrap(each: torch.Tensor) -> torch.Tensor:
            return changed[id(each)] if id(each) in changed else DeviceTensor(each)

        return tree_map_only(torch.Tensor, wrap, found)


class _Functions(TorchFunctionMode):
    """Does as torch does on CUDA, and not on a device of this name."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == NAME:
            return func(*args, **kwargs | {"device": HOST}).to(NAME)
        if func in _INDEXING and isinstance(args[0], DeviceTensor):
            indices = tuple(map(_as_index, args[1] if isinstance(args[1], tuple) else args[1:2]))
            args = args[0], indices, *args[2:]
            is_number = len(args) > 2 and not isinstance(args[2], torch.Tensor)
            if is_number and any(isinstance(each, torch.Tensor) for each in indices):
                self._device.counts["upload"] += 1  # it is a tensor on the host, which is copied
        return func(*args, **kwargs)


class _Kernel:
    """Launches an interpreted kernel with the values of its tensors, or nothing."""

    def __init__(self, device: FakeDevice, kernel: Any) -> None:
        self._device, self._kernel = device, kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self._device.num_launches += 1
            if self._kernel is not None:
                values = [each.held if isinstance(each, DeviceTensor) else each for each in arguments]
                self._kernel[grid](*values, **options)

        return launch


def _as_index(index: Any) -> Any:
    """Returns a list as a tensor on the host."""
    return torch.tensor(index) if isinstance(index, list) else index


def _values(arguments: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda each: each.held, arguments)


def _has_mask(indices: Any) -> bool:
    return any(each is not None and each.dtype == torch.bool for each in indices)
