"""What steps rely on in torch without a promise of it; see test_torch_compat.py."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardopt.torch_compat import (
    capturing_graph,
    raw_step,
    run_post_hooks,
    run_pre_hooks,
    run_wrapper_post_hooks,
    run_wrapper_pre_hooks,
    stand_in,
    trainable_of,
    unscale_in_place,
    versions_of,
)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Notes global step hooks."""
    noted: list[str] = []
    handle = register_optimizer_step_pre_hook(lambda *_: noted.append("global"))
    yield noted
    handle.remove()


def hooked_sgd(calls: list[str]) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = torch.optim.SGD([param], lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    return param, optimizer


def test_raw_step_is_the_update_without_hooks(calls: list[str]) -> None:
    param, optimizer = hooked_sgd(calls)
    assert torch.optim.SGD.step.hooked
    assert not hasattr(torch.optim.SGD.step.__wrapped__, "hooked")
    raw_step(optimizer)()
    assert calls == []
    assert torch.equal(param.detach(), torch.full((2,), 0.5))
    optimizer.step()
    assert calls == ["global", "pre", "post"]


def test_raw_step_takes_a_closure_and_returns_its_loss(calls: list[str]) -> None:
    _, optimizer = hooked_sgd(calls)
    assert raw_step(optimizer)(lambda: 3.0) == 3.0


def test_raw_step_of_a_class_torch_has_not_patched() -> None:
    class Bare(torch.optim.SGD):
        def __init__(self) -> None:  # without torch's constructor, which patches the class
            self.stepped = False

        def step(self, closure: Any = None) -> None:
            self.stepped = True

    optimizer = Bare()
    raw_step(optimizer)()
    assert optimizer.stepped


def test_raw_step_sees_through_a_scheduler_and_does_what_its_patch_does(calls: list[str]) -> None:
    param, optimizer = hooked_sgd(calls)
    scheduler = ConstantLR(optimizer)
    patch = vars(optimizer)["step"]
    assert patch._wrapped_by_lr_sched
    assert patch.__wrapped__ is torch.optim.SGD.step
    # All that the patch does beside calling the step.
    before = {name: value for name, value in vars(optimizer).items() if name != "_opt_called"}
    raw_step(optimizer)()
    assert optimizer._opt_called is True
    assert {name: value for name, value in vars(optimizer).items() if name != "_opt_called"} == before
    assert calls == []
    assert param.detach()[0] < 1
    scheduler.step()


def test_raw_step_calls_another_patch_as_it_is(calls: list[str]) -> None:
    _, optimizer = hooked_sgd(calls)
    optimizer.step = lambda closure=None: calls.append("patched")  # type: ignore[method-assign]
    raw_step(optimizer)()
    run_pre_hooks(optimizer, None)
    run_post_hooks(optimizer, None)
    # Its hooks are the patch's own affair: it usually calls the step it has replaced.
    assert calls == ["patched"]


def test_run_pre_hooks_runs_the_instances_hooks(calls: list[str]) -> None:
    _, optimizer = hooked_sgd(calls)
    run_pre_hooks(optimizer, None)
    assert calls == ["pre"]


def test_run_post_hooks_runs_the_instances_hooks(calls: list[str]) -> None:
    _, optimizer = hooked_sgd(calls)
    run_post_hooks(optimizer, None)
    assert calls == ["post"]


def test_run_wrapper_pre_hooks_are_torchs_global_ones_and_the_instances(calls: list[str]) -> None:
    _, optimizer = hooked_sgd(calls)
    handle = register_optimizer_step_pre_hook(lambda one, args, kwargs: calls.append("mine") or ((one, 1), {}))
    try:
        assert run_wrapper_pre_hooks(optimizer, (optimizer,), {}) == ((optimizer, 1), {})
    finally:
        handle.remove()
    assert calls == ["global", "mine", "pre"]
    optimizer.register_step_pre_hook(lambda *_: 3)
    with pytest.raises(RuntimeError, match=r"must return None or a tuple of \(new_args, new_kwargs\), but got 3"):
        run_wrapper_pre_hooks(optimizer, (optimizer,), {})


def test_run_wrapper_post_hooks_are_the_instances_and_torchs_global_ones(calls: list[str]) -> None:
    _, optimizer = hooked_sgd(calls)
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("mine"))
    try:
        run_wrapper_post_hooks(optimizer, (optimizer,), {})
    finally:
        handle.remove()
    assert calls == ["post", "mine"]


def test_capturing_graph_is_asked_of_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not capturing_graph()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert capturing_graph()


def test_unscale_in_place_is_what_grad_scaler_calls() -> None:
    found = torch.zeros(1)
    gradients = [torch.tensor([2.0, 4.0]), torch.tensor([[8.0]])]
    unscale_in_place(gradients, torch.tensor(0.5), found)
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 2.0], [[4.0]]]
    assert found.item() == 0
    unscale_in_place([torch.tensor([float("inf")])], torch.tensor(0.5), found)
    assert found.item() == 1
    # shardopt.GradScaler overrides the method that calls it, and step() and unscale_() go through it.
    arguments = list(inspect.signature(torch.amp.GradScaler._unscale_grads_).parameters)
    assert arguments == ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"]


def test_stand_in_has_the_attributes_of_its_parameter_also_later_ones() -> None:
    param = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    param.lr_scale = 0.5  # type: ignore[attr-defined]
    leaf = stand_in(param, torch.zeros(2))
    assert isinstance(leaf, torch.nn.Parameter)
    assert (tuple(leaf.shape), leaf.requires_grad, leaf.is_leaf) == ((2,), False, True)
    param.decay = True  # type: ignore[attr-defined]
    leaf.seen = 1  # type: ignore[attr-defined]
    assert (leaf.lr_scale, leaf.decay, param.seen) == (0.5, True, 1)  # type: ignore[attr-defined]
    # What torch keeps in there of its own would be shared too.
    assert set(vars(torch.nn.Parameter(torch.ones(1)))) <= {"_is_param"}


def test_trainable_of_asks_no_subclass() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"asked for {func}")

    frozen = torch.ones(2).as_subclass(Loud)
    param = nn.Parameter(torch.ones(2))
    assert trainable_of([frozen, param]) == [False, True]


def test_versions_of_tell_of_every_write_but_those_through_data(mesh: DeviceMesh) -> None:
    # Of a DTensor and of the tensor within it: an operation on one moves the counter of that one alone.
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    local = param._local_tensor
    with torch.no_grad():
        param.copy_(param.detach() * 2)
        assert versions_of([param, local]) == [1, 0]
        param.to_local().copy_(torch.ones(4))
        assert versions_of([param, local]) == [1, 1]
    plain = nn.Parameter(torch.ones(4))
    plain.data.fill_(2.0)
    assert versions_of([plain]) == [0]
