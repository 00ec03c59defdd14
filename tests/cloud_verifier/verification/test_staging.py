"""What a step sends to the device: in one copy, to memory that stays where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cloud_verifier.verification.staging import Staging, upload

CPU = torch.device("cpu")


class Copies(TorchDispatchMode):
    """Counts copies."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@contextmanager
def copies(expected: int) -> Iterator[None]:
    with Copies() as found:
        yield
    assert found.num == expected


@pytest.fixture
def staging() -> Staging:
    return Staging(CPU, 1024)


def numbers(*lengths: int) -> list[np.ndarray]:
    return [np.arange(length, dtype=np.int32) + length for length in lengths]


def step(staging: Staging, *lengths: int, is_fixed: bool = True) -> list[int]:
    """The addresses of what a step adds."""
    arrays = numbers(*lengths)
    staging.start()
    added = [staging.add(each) for each in arrays]
    assert staging.is_fixed == is_fixed
    staging.send()
    assert all(each.tolist() == array.tolist() for each, array in zip(added, arrays, strict=True))
    return [each.data_ptr() for each in added]


def test_all_of_a_step_is_one_copy_what_is_attached_too(staging: Staging) -> None:
    words, keys = np.arange(3, dtype=np.int32), np.array([[2**62, -1]])
    weights = np.linspace(0, 1, 5)
    attached = staging.attach([keys, weights, np.zeros((0, 4), np.float32)])
    with copies(1):
        staging.start()
        first = staging.add(words)
        staging.send()
    assert first.tolist() == [0, 1, 2] and first.dtype == torch.int32
    sent = attached.tensors
    assert sent[0].tolist() == keys.tolist() and sent[1].tolist() == weights.tolist()
    assert sent[2].shape == (0, 4) and [each.dtype for each in sent[:2]] == [torch.int64, torch.float64]


def test_the_same_sizes_have_the_same_addresses_whatever_is_attached(staging: Staging) -> None:
    first = step(staging, 3, 5)
    staging.attach(numbers(7))
    assert step(staging, 3, 2) == first
    assert all(address % 16 == first[0] % 16 for address in step(staging, 1, 3, 5)), "aligned"


def test_views_that_are_kept_are_of_their_own_place_dtype_and_shape(staging: Staging) -> None:
    for shape, dtype in (
        ((6,), np.int64),
        ((2, 3), np.int64),
        ((6,), np.float64),
        ((12,), np.int32),
        ((0, 4), np.int32),
    ):
        for number in range(2):
            array = np.full(shape, number + 1, dtype)
            staging.start()
            staging.add(np.zeros(number, np.int32))  # moves the second to another place
            added = staging.add(array)
            staging.send()
            assert added.numpy().dtype == dtype and added.tolist() == array.tolist()


def test_addresses_of_a_second_pass_do_not_follow_from_the_size_of_the_first() -> None:
    staging, found = Staging(CPU), []
    for length in (3, 999):
        staging.start()
        staging.add(np.arange(length))
        staging.start_pass()
        found.append(staging.add(np.arange(4)).data_ptr())
        staging.send()
    assert found[0] == found[1]


def test_a_step_that_needs_more_memory_than_any_before_has_a_copy_more_and_the_next_has_not(
    staging: Staging,
) -> None:
    with copies(2):
        step(staging, 100, 400, is_fixed=False)
    with copies(1):
        found = step(staging, 100, 400)
    assert step(staging, 100, 400) == found
    attached = staging.attach(numbers(40_000))
    with copies(2):
        step(staging, 100, 400)
    assert attached.tensors[0].tolist() == numbers(40_000)[0].tolist()


def test_what_a_forward_that_failed_had_attached_is_not_sent(staging: Staging) -> None:
    failed, again = staging.attach(numbers(3)), staging.attach(numbers(4))
    step(staging, 1)
    assert not failed.tensors and again.tensors[0].tolist() == numbers(4)[0].tolist()


def test_what_is_added_outside_of_a_step_is_there_at_once(staging: Staging) -> None:
    """Attention is planned by itself where it is checked."""
    staging.start()
    first = staging.add(np.array([1, 2]))
    staging.send()
    assert staging.add(np.array([3, 4])).tolist() == [3, 4] and first.tolist() == [1, 2]


def test_arrays_of_a_step_of_their_own_are_one_copy() -> None:
    with copies(1):
        found = upload(numbers(3, 1, 9), CPU)
    assert [each.tolist() for each in found] == [each.tolist() for each in numbers(3, 1, 9)]
