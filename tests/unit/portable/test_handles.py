"""Handles: what DCP and its stagers do with them, and what nobody may do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.utils._pytree import tree_map

from shardopt.errors import FormatError, ShardoptError
from shardopt.geometry import Box
from shardopt.portable.handles import ABSENT_SHAPE, BoxHandle, BytesHandle, Handle, Lease, ThisProcessOnly

BOX = Box((2, 0), (3, 4))
SHAPE = (7, 4)


def live() -> torch.Tensor:
    # Rows 2 to 4 of 7: neither end of the parameter.
    return torch.arange(12.0).reshape(3, 4)


def box_handle(tensor: torch.Tensor | None = None) -> BoxHandle:
    tensor = live() if tensor is None else tensor
    return BoxHandle.make(SHAPE, BOX, tensor, like=torch.zeros(BOX.size), place=lambda local: local * 10)


def absent_handle() -> BoxHandle:
    return BoxHandle.make(SHAPE, BOX, None, like=torch.zeros(BOX.size), place=lambda local: local)


def bytes_handle() -> BytesHandle:
    return BytesHandle.make(
        [(0, torch.tensor([1, 2], dtype=torch.uint8)), (2, torch.tensor([3], dtype=torch.uint8))], 3
    )


EVERY_KIND = pytest.mark.parametrize("make", [box_handle, absent_handle, bytes_handle])


def chunks(handle: Handle) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(one.offsets), tuple(one.sizes)) for one in handle.__create_chunk_list__()]


def deliver(handle: Handle, tensor: torch.Tensor) -> None:
    """What a reader does with a chunk that has arrived in one piece."""
    ((offset, size),) = chunks(handle)
    target = handle.__get_tensor_shard__(MetadataIndex("x", offset))
    for dim, length in enumerate(size):
        target = target.narrow(dim, 0, length)
    assert target.size() == tensor.size()
    target.detach().copy_(tensor)


@EVERY_KIND
@pytest.mark.parametrize(
    "use",
    [
        lambda one: one + 1,
        lambda one: one.mul_(2),
        lambda one: torch.equal(one, one),
        lambda one: one.sum(),
        lambda one: one[:1],
        lambda one: torch.zeros(1).copy_(one),
        lambda one: torch.cat([one, one]),
    ],
    ids=["add", "mul_", "equal", "sum", "slice", "copy_", "cat"],
)
def test_a_handle_refuses_to_be_computed_with(make: Callable[[], Handle], use: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"is a handle for saving and loading, not a tensor.*sharded_state\(\)"):
        use(make())


@EVERY_KIND
@pytest.mark.parametrize("use", [torch.Tensor.tolist, torch.Tensor.numpy, bool, list])
def test_a_handle_does_not_become_python_values(make: Callable[[], Handle], use: Callable[[Any], Any]) -> None:
    # Some of these torch refuses itself, with sentences of its own.
    with pytest.raises((RuntimeError, TypeError)):
        use(make())


@EVERY_KIND
def test_repr_says_what_it_holds_and_reads_nothing(make: Callable[[], Handle]) -> None:
    handle = make()
    assert repr(handle).startswith(
        f"{type(handle).__name__}(shape={tuple(handle.shape)}, dtype={handle.dtype}, holds=[("
    )


@EVERY_KIND
def test_detaching_keeps_the_handle_itself(make: Callable[[], Handle]) -> None:
    handle = make()
    assert handle.detach() is handle
    assert tree_map(torch.Tensor.detach, {"x": [handle]})["x"][0] is handle
    assert not handle.requires_grad


@pytest.mark.parametrize("copier", [copy.deepcopy, torch.clone, lambda one: one.to("cpu", copy=True)])
def test_a_copy_is_a_snapshot(copier: Callable[[Any], Any]) -> None:
    tensor = live()
    handle = box_handle(tensor)
    assert handle.tensors[0].data_ptr() == tensor.data_ptr()
    snapshot = copier(handle)
    tensor.zero_()
    assert type(snapshot) is BoxHandle
    assert torch.equal(snapshot.tensors[0], live())
    assert torch.equal(handle.tensors[0], torch.zeros(3, 4))
    assert (snapshot.offsets, snapshot.box, snapshot.absent) == ([(2, 0)], BOX, False)
    assert (tuple(snapshot.shape), snapshot.dtype) == (SHAPE, torch.float32)


@EVERY_KIND
def test_pickle_round_trip(make: Callable[[], Handle]) -> None:
    handle = make()
    handle.refuse_save = "not now"
    other = pickle.loads(pickle.dumps(handle))
    assert type(other) is type(handle)
    assert (tuple(other.shape), other.dtype, other.device) == (tuple(handle.shape), handle.dtype, handle.device)
    assert other.offsets == handle.offsets
    assert all(map(torch.equal, other.tensors, handle.tensors))
    assert other.refuse_save == "not now"
    assert not other.was_read
    # Functions stay in their process.
    if isinstance(handle, BoxHandle):
        assert handle.template.value is not None
        assert (other.box, other.absent) == (handle.box, handle.absent)
        assert other.template.value is None
        assert other.placed.value is None


@EVERY_KIND
def test_what_was_read_is_not_dropped_by_a_pickle_but_refused(make: Callable[[], Handle]) -> None:
    handle = make()
    chunks(handle)
    for one in (handle, copy.deepcopy(handle)):
        with pytest.raises(
            ShardoptError, match=r"read into by a load.* Give it to load_state_dict\(\), and pickle the"
        ):
            pickle.dumps(one)


@pytest.mark.parametrize("away", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), StateDictStager().stage])
def test_a_lease_is_copied_with_the_answer_of_the_moment(away: Callable[[Any], Any]) -> None:
    changed = False
    lease = Lease(lambda: changed)
    early = away(lease)
    changed = True
    late = away(lease)
    assert (lease.over(), early.over(), late.over()) == (True, False, True)
    assert (early.value, late.value) == (None, None)
    assert away(late).over()


def test_live_memory_that_has_changed_is_not_pickled() -> None:
    changed = False
    handle = bytes_handle()
    handle.outdated = Lease(lambda: changed)
    early = pickle.loads(pickle.dumps(handle))
    staged = copy.deepcopy(handle)
    changed = True
    with pytest.raises(ShardoptError, match=r"values of two moments would be mixed"):
        pickle.dumps(handle)
    assert early.why_outdated is staged.why_outdated is None
    # Too late: it goes to another process all the same, where every rank is told.
    late = pickle.loads(pickle.dumps(copy.deepcopy(handle)))
    with pytest.raises(ShardoptError, match=r"values of two moments would be mixed"):
        late.__create_write_items__("x", late)


def test_bytes_as_if_they_had_been_read() -> None:
    for handle in (bytes_handle(), BytesHandle.of(b"")):
        filled = handle.as_read()
        assert filled.was_read
        assert filled.problem() is None
        assert torch.equal(filled.contents(), handle.contents())


@EVERY_KIND
@pytest.mark.parametrize("shared", [False, True])
def test_torchs_stager_keeps_a_handle_a_handle(make: Callable[[], Handle], shared: bool) -> None:
    handle = make()
    stager = StateDictStager(share_memory=shared)
    staged = stager.stage({"x": handle})["x"]
    assert type(staged) is type(handle)
    assert (tuple(staged.shape), staged.dtype, staged.offsets) == (tuple(handle.shape), handle.dtype, handle.offsets)
    for one, other in zip(staged.tensors, handle.tensors, strict=True):
        assert torch.equal(one, other)
        assert one.is_shared() == shared
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert write_items(staged) == write_items(handle)
    stager.close()


def test_new_empty_is_a_blank_of_the_same_kind() -> None:
    blank = box_handle().new_empty([], device="cpu")
    assert type(blank) is BoxHandle
    assert (tuple(blank.shape), blank.dtype) == (SHAPE, torch.float32)
    assert vars(blank) == {}


def write_items(handle: Handle) -> list[tuple[Any, ...]]:
    return [
        (
            tuple(item.index.offset or ()),
            tuple(item.tensor_data.chunk.sizes),
            tuple(item.tensor_data.size),
            item.tensor_data.properties.dtype,
        )
        for item in handle.__create_write_items__("x", handle)
    ]


def test_what_is_saved_is_live_memory_at_its_place() -> None:
    tensor = live().requires_grad_()
    handle = box_handle(tensor)
    assert write_items(handle) == [((2, 0), (3, 4), (7, 4), torch.float32)]
    part = handle.__get_tensor_shard__(MetadataIndex("x", torch.Size((2, 0))))
    assert part.data_ptr() == tensor.data_ptr()
    assert not part.requires_grad
    assert write_items(bytes_handle()) == [((0,), (2,), (3,), torch.uint8), ((2,), (1,), (3,), torch.uint8)]
    with pytest.raises(FormatError, match=r"x: no box of this entry starts at \(1, 0\) on this rank"):
        handle.__get_tensor_shard__(MetadataIndex("x", torch.Size((1, 0))))


def test_an_empty_shard_writes_nothing_and_an_empty_tensor_its_key() -> None:
    empty = BoxHandle.make((7, 4), Box((7, 0), (0, 4)), torch.empty(0, 4), like=torch.empty(0, 4), place=torch.clone)
    assert write_items(empty) == []
    assert chunks(empty) == []
    nothing = BoxHandle.make((0, 4), Box((0, 0), (0, 4)), torch.empty(0, 4), like=torch.empty(0, 4), place=torch.clone)
    assert write_items(nothing) == [((0, 0), (0, 4), (0, 4), torch.float32)]
    assert write_items(BytesHandle.of(b"")) == [((0,), (0,), (0,), torch.uint8)]


def test_the_marker_of_an_absent_entry() -> None:
    handle = absent_handle()
    assert handle.absent
    assert tuple(handle.shape) == ABSENT_SHAPE == (0,)
    assert write_items(handle) == [((0,), (0,), (0,), torch.uint8)]
    assert handle.wanted_shape == SHAPE
    # Present in the checkpoint, it is read in full.
    assert handle.size() == torch.Size(SHAPE)
    assert chunks(handle) == [((2, 0), (3, 4))]
    # Absent there too, DCP is told of nothing to read.
    assert handle.size() == torch.Size(ABSENT_SHAPE)
    assert chunks(handle) == []


def test_refuse_save_refuses_only_saving() -> None:
    handle = box_handle()
    handle.refuse_save = "half updated"
    with pytest.raises(ShardoptError, match="half updated"):
        handle.__create_write_items__("x", handle)
    assert chunks(handle) == [((2, 0), (3, 4))]


@EVERY_KIND
def test_a_size_never_differs_but_is_remembered(make: Callable[[], Handle]) -> None:
    handle = make()
    assert handle.saved_size is None
    assert not handle.size() != torch.Size((5, 9))
    assert handle.saved_size == (5, 9)
    assert handle.size() == torch.Size((5,))
    assert handle.saved_size == (5,)
    assert not torch.Size((6,)) != handle.size()
    assert handle.saved_size == (6,)
    # Otherwise it is the shape.
    assert (*handle.size(),) == tuple(handle.shape)
    assert len(handle.size()) == handle.dim()
    assert handle.size(0) == handle.size()[0] == handle.shape[0]
    with pytest.raises(TypeError, match="unhashable"):
        hash(handle.size())


def test_a_load_fills_scratch_and_never_live_memory() -> None:
    tensor = live()
    handle = box_handle(tensor)
    assert not handle.was_read
    assert handle.size() == torch.Size(SHAPE)
    deliver(handle, torch.full((3, 4), 7.0))
    assert handle.was_read
    (scratch,) = handle.scratch or ()
    assert torch.equal(scratch.tensor(), torch.full((3, 4), 7.0))
    assert scratch.missing() is None
    assert torch.equal(tensor, live())


def test_another_saved_shape_is_not_read() -> None:
    handle = box_handle()
    assert handle.size() == torch.Size((7, 5))
    assert chunks(handle) == []
    assert handle.was_read
    assert handle.scratch == []


def test_what_a_load_has_read_is_not_saved_as_live_memory() -> None:
    handle = box_handle(live())
    deliver(handle, torch.full((3, 4), 7.0))
    with pytest.raises(ShardoptError, match="has been read into by a load"):
        write_items(handle)


def test_a_new_entry_is_laid_out_like_its_parameter() -> None:
    like = torch.zeros(4, 3).t()
    handle = BoxHandle.make(SHAPE, BOX, None, like=like, place=torch.clone)
    assert handle.size() == torch.Size(SHAPE)
    deliver(handle, live())
    (scratch,) = handle.scratch or ()
    assert scratch.tensor().stride() == like.stride()
    assert torch.equal(scratch.tensor(), live())


def test_full_tensor() -> None:
    assert torch.equal(box_handle().full_tensor(), live() * 10)
    with pytest.raises(TypeError, match="does not exist yet; there is nothing to gather"):
        absent_handle().full_tensor()
    for away in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        with pytest.raises(TypeError, match="staged or sent to another process"):
            away(box_handle()).full_tensor()
    plain = BoxHandle.make((3, 4), Box.whole((3, 4)), tensor := live(), like=tensor, place=lambda local: local)
    assert plain.full_tensor().data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("saved", [0, 2, 5])
def test_bytes_of_any_length_are_read(saved: int) -> None:
    handle = bytes_handle()
    assert handle.contents().tolist() == [1, 2, 3]
    assert handle.size() == torch.Size((saved,))
    if saved:
        deliver(handle, torch.arange(saved, dtype=torch.uint8))
    else:
        assert chunks(handle) == []
    assert handle.contents().tolist() == list(range(saved))


@pytest.mark.parametrize("saved", [None, (), (2, 3)])
def test_what_are_no_bytes_is_not_read(saved: tuple[int, ...] | None) -> None:
    handle = bytes_handle()
    if saved is not None:
        assert handle.size() == torch.Size(saved)
    assert chunks(handle) == []
    assert handle.scratch == []


def test_this_process_only_goes_nowhere() -> None:
    held = ThisProcessOnly(object())
    assert held.value is not None
    assert copy.deepcopy(held).value is None
    assert pickle.loads(pickle.dumps(held)).value is None
    assert StateDictStager().stage(held).value is None


@EVERY_KIND
def test_a_blank_copied_into_is_a_snapshot_on_the_cpu(make: Callable[[], Handle]) -> None:
    one = make()
    copied = torch.zeros_like(one, device="cpu").copy_(one)
    assert type(copied) is type(one)
    assert copied.shape == one.shape
    assert copied.offsets == one.offsets
    for mine, theirs in zip(copied.tensors, one.tensors, strict=True):
        assert mine.equal(theirs)
        assert mine is not theirs
        assert mine.numel() == 0 or mine.data_ptr() != theirs.data_ptr()
    assert [i.index for i in copied.__create_write_items__("x", copied)] == [
        i.index for i in one.__create_write_items__("x", one)
    ]


@EVERY_KIND
def test_a_blank_cannot_be_saved_before_nor_copied_into_twice(make: Callable[[], Handle]) -> None:
    blank = torch.zeros_like(make())
    with pytest.raises(ShardoptError, match="nothing was copied into it"):
        blank.__create_write_items__("x", blank)
    blank.copy_(make())
    with pytest.raises(RuntimeError, match="use torch's DefaultStager"):
        blank.copy_(make())


def test_a_blank_takes_over_why_a_state_must_not_be_saved() -> None:
    poisoned = box_handle()
    poisoned.refuse_save = "half updated"
    copied = torch.zeros_like(poisoned).copy_(poisoned)
    with pytest.raises(ShardoptError, match="half updated"):
        copied.__create_write_items__("x", copied)
