"""``local``: what the inner optimizer is shown during a step, and that nothing of it is left afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardopt import PresentationError, ShardedStateOptimizer
from shardopt.torch_compat import local_shard

# Three, so that losing, replacing or moving the state of the middle one shows.
NUM_PARAMETERS = 3


class Pair:
    """The same training twice: wrapped on DTensors, and bare on plain tensors of the same values."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        values = [torch.randn(4, 3) for _ in range(NUM_PARAMETERS)]
        self.plain = nn.ParameterList(nn.Parameter(value.clone()) for value in values)
        self.sharded = nn.ParameterList(nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for v in values)
        self.bare = torch.optim.AdamW(self.plain, lr=0.1)
        self.inner = torch.optim.AdamW(self.sharded, lr=0.1)
        self.wrapped = ShardedStateOptimizer(self.inner, self.sharded)

    def step(self) -> None:
        """One step of both, with the same gradients."""
        for ours, theirs in zip(self.sharded, self.plain, strict=True):
            theirs.grad = torch.randn(4, 3)
            ours.grad = distribute_tensor(theirs.grad, ours.device_mesh, ours.placements)
        self.wrapped.step()
        self.bare.step()

    def check(self) -> None:
        """Parameters and state are equal, bit by bit, and filed under the user's parameters."""
        assert list(self.wrapped.state) == [self.sharded[i] for i in self.order()]
        for ours, theirs in zip(self.sharded, self.plain, strict=True):
            assert torch.equal(local_shard(ours), theirs)
            mine, other = self.wrapped.state.get(ours, {}), self.bare.state.get(theirs, {})
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[entry], other[entry]) for entry in other)

    def order(self) -> list[int]:
        """Places of the parameters in the order in which the bare optimizer's state has them."""
        return [next(i for i, p in enumerate(self.plain) if p is key) for key in self.bare.state]


@pytest.fixture
def pair(mesh: DeviceMesh) -> Pair:
    pair = Pair(mesh)
    pair.step()
    pair.step()
    pair.check()
    return pair


def clear(state: Any, params: nn.ParameterList) -> None:
    state.clear()


def drop_one(state: Any, params: nn.ParameterList) -> None:
    del state[params[1]]


def move_to_the_end(state: Any, params: nn.ParameterList) -> None:
    state[params[0]] = state.pop(params[0])


def replace_one(state: Any, params: nn.ParameterList) -> None:
    # Another dict with another moment: reading the state that was shown last would go on with the old one.
    old = state[params[1]]
    state[params[1]] = {**old, "exp_avg": old["exp_avg"] * 2}


def exchange_two(state: Any, params: nn.ParameterList) -> None:
    state[params[0]], state[params[1]] = state[params[1]], state[params[0]]


@pytest.mark.parametrize("change", [clear, drop_one, move_to_the_end, replace_one, exchange_two])
def test_state_that_the_user_changes_between_steps_is_what_the_next_step_sees(
    pair: Pair, change: Callable[[Any, nn.ParameterList], None]
) -> None:
    change(pair.wrapped.state, pair.sharded)
    change(pair.bare.state, pair.plain)
    pair.step()
    pair.check()
    pair.step()
    pair.check()


def test_the_inner_optimizer_sees_plain_tensors_that_share_the_shards_memory(pair: Pair) -> None:
    user_state, user_list = pair.inner.state, pair.inner.param_groups[0]["params"]
    seen: list[list[torch.Tensor]] = []
    step = pair.inner.step

    def watch(closure: Any = None) -> Any:
        shown = pair.inner.param_groups[0]["params"]
        assert list(pair.inner.state) == shown
        assert all(leaf.grad is local_shard(param.grad) for leaf, param in zip(shown, pair.sharded, strict=True))
        seen.append(list(shown))
        return step(closure)

    pair.inner.step = watch  # type: ignore[method-assign]
    pair.step()
    pair.check()
    (leaves,) = seen
    assert not any(isinstance(leaf, DTensor) for leaf in leaves)
    assert [leaf.data_ptr() for leaf in leaves] == [local_shard(param).data_ptr() for param in pair.sharded]
    assert all(leaf.grad is None for leaf in leaves)
    assert pair.inner.state is user_state
    assert pair.inner.param_groups[0]["params"] is user_list
    assert all(ours is theirs for ours, theirs in zip(user_list, pair.sharded, strict=True))


@pytest.mark.parametrize("replaces", [False, True], ids=["in place", "another mapping"])
def test_state_that_the_inner_optimizer_changes_is_the_users_afterwards(pair: Pair, replaces: bool) -> None:
    def disturb(closure: Any = None) -> None:
        first, second, third = pair.inner.param_groups[0]["params"]
        state = {} if replaces else pair.inner.state
        state[third], state[second] = {"entry": torch.ones(4, 3)}, pair.inner.state[third]
        state.pop(first, None)
        pair.inner.state = state  # type: ignore[assignment]

    user_state = pair.inner.state
    third_state = user_state[pair.sharded[2]]
    pair.inner.step = disturb  # type: ignore[method-assign,assignment]
    pair.wrapped.step()
    assert pair.inner.state is user_state
    assert set(user_state) == {pair.sharded[1], pair.sharded[2]}
    assert user_state[pair.sharded[1]] is third_state
    assert list(user_state[pair.sharded[2]]) == ["entry"]


def test_everything_is_put_back_when_the_inner_optimizer_raises(pair: Pair) -> None:
    user_state, user_list = pair.inner.state, pair.inner.param_groups[0]["params"]
    leaves: list[torch.Tensor] = []

    def fail(closure: Any = None) -> None:
        leaves.extend(pair.inner.param_groups[0]["params"])
        raise OSError("no kernel")

    pair.inner.step = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(OSError, match="no kernel"):
        pair.wrapped.step()
    assert pair.inner.state is user_state
    assert pair.inner.param_groups[0]["params"] is user_list
    assert [leaf.grad for leaf in leaves] == [None] * NUM_PARAMETERS
    pair.check()


def test_a_shard_that_was_replaced_by_an_equal_one_is_followed(pair: Pair) -> None:
    param = pair.sharded[1]
    param._local_tensor = local_shard(param).clone()
    pair.step()
    pair.check()


def test_a_shard_of_another_dtype_is_refused_by_name(pair: Pair) -> None:
    for param in pair.sharded[1:]:
        param._local_tensor = local_shard(param).double()
    with pytest.raises(PresentationError, match=r"^2 parameters are not those") as caught:
        pair.wrapped.step()
    for name in "12":
        was = f"{name}: this rank's part was torch.float32(4, 3) on cpu and is now torch.float64(4, 3) on cpu"
        assert was in str(caught.value)


def test_a_plain_gradient_is_refused_by_name(pair: Pair) -> None:
    pair.sharded[1].grad = torch.zeros(4, 3)
    with pytest.raises(PresentationError, match=r"^1: .* its gradient is a plain tensor of shape \(4, 3\)"):
        pair.wrapped.step()
