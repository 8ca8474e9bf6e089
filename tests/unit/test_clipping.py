"""Clipping in one process is torch's, and refuses what it cannot count before it changes anything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import RankFailureError, ScopeError, ShardedStateOptimizer, clip_grad_norm_

INF = math.inf


def with_gradient(value: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(value))
    param.grad = value.clone()
    return param


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix whose gradient is transposed, a vector, a scalar, an empty one, and one without a gradient."""
    source = torch.Generator().manual_seed(0)
    made = [with_gradient(torch.randn(shape, generator=source).to(dtype)) for shape in ((4, 3), (7,), (), (0, 2))]
    made[0].grad = torch.randn(3, 4, generator=source).to(dtype).T
    return [*made, nn.Parameter(torch.zeros(2, dtype=dtype))]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.0, 0.25, 1e3])
@pytest.mark.parametrize("order", [0.5, 1, 2.0, 3.5, "inf", INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_torchs(dtype: torch.dtype, order: Any, max_norm: float, foreach: bool | None) -> None:
    mine, its = params(dtype), params(dtype)
    before = [(id(p.grad), p.grad.data_ptr(), p.grad.stride()) for p in mine[:4]]
    norm = clip_grad_norm_(mine, max_norm, order, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_([p for p in its if p.numel()], max_norm, order)
    rtol = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(norm, expected, rtol=0.0 if order in ("inf", INF) else rtol, atol=0.0)
    for one, other in zip(mine[:4], its[:4], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=rtol, atol=0.0)
    assert mine[4].grad is None
    assert [(id(p.grad), p.grad.data_ptr(), p.grad.stride()) for p in mine[:4]] == before


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_small_factor_is_not_rounded_to_a_narrow_dtype(dtype: torch.dtype, foreach: bool | None) -> None:
    # 2**-26 / 2**0 is 0 in float16, 2**-26 * 2**15 is not. 1e-6 is lost beside 2**15 in float32.
    param = with_gradient(torch.full((1,), 2.0**15, dtype=dtype))
    assert clip_grad_norm_(param, 2.0**-11, foreach=foreach) == 2.0**15
    assert param.grad.item() == 2.0**-11


def test_gradients_of_a_norm_within_bounds_keep_their_bits() -> None:
    made = params()
    version = made[0].grad._version
    clip_grad_norm_(made, 1e3)
    assert made[0].grad._version == version


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize("value", [INF, math.nan])
def test_not_finite(value: float, order: float, raises: bool) -> None:
    mine, its = ([with_gradient(torch.tensor([1.0, value])), with_gradient(torch.ones(2))] for _ in range(2))
    if raises:
        with pytest.raises(RuntimeError, match="so they cannot be clipped"):
            clip_grad_norm_(mine, 1.0, order, error_if_nonfinite=True)
        assert mine[1].grad.tolist() == [1.0, 1.0]
        return
    norm = clip_grad_norm_(mine, 1.0, order)
    expected = torch.nn.utils.clip_grad_norm_(its, 1.0, order)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(one.grad, other.grad, equal_nan=True)


def test_squares_of_large_norms_do_not_overflow() -> None:
    # Each tensor's own square is within float64, their sum is not; the largest float64 is 1.8e308.
    made = [with_gradient(torch.tensor([1e153], dtype=torch.float64)) for _ in range(10000)]
    assert clip_grad_norm_(made, 1.0).item() == pytest.approx(1e155, rel=1e-12)


def test_complex_gradients_count_by_their_magnitude() -> None:
    param = with_gradient(torch.tensor([3 + 4j, 0j]))
    norm = clip_grad_norm_([param], 1.0)
    assert (norm.item(), norm.dtype) == (5.0, torch.float32)
    assert param.grad[0].item() == pytest.approx(0.6 + 0.8j)


def test_a_tensor_a_generator_an_optimizer_and_doubles_of_a_parameter() -> None:
    made = params()
    norm = clip_grad_norm_(made, 1e3)
    model = nn.ParameterList(made)
    inner = torch.optim.SGD([{"params": made[:1]}, {"params": made[1:]}], lr=1.0)
    assert clip_grad_norm_(inner, 1e3) == norm
    assert clip_grad_norm_(ShardedStateOptimizer(inner, model), 1e3) == norm
    assert clip_grad_norm_(model.parameters(), 1e3) == norm
    assert clip_grad_norm_([*made, made[0]], 1e3) == norm  # torch counts it twice, and scales it twice
    assert clip_grad_norm_(made[1], 1e3) == made[1].grad.norm()


def test_nothing_to_clip() -> None:
    for norm in (clip_grad_norm_([], 1.0), clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0)):
        assert type(norm) is Tensor
        assert (norm.item(), norm.shape, norm.dtype) == (0.0, (), torch.float32)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((one for one in ()), 1.0)


@pytest.mark.parametrize(
    ("max_norm", "order"), [(-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0), (1.0, -INF), (1.0, math.nan)]
)
def test_numbers_out_of_range(max_norm: float, order: float) -> None:
    made = params()
    with pytest.raises(ValueError, match="max_norm is|norm_type is"):
        clip_grad_norm_(made, max_norm, order)


def test_a_module_is_no_parameter() -> None:
    with pytest.raises(TypeError, match="contains a Linear"):
        clip_grad_norm_(nn.Sequential(nn.Linear(1, 1)), 1.0)


def test_sparse_gradients_are_refused() -> None:
    dense, embedding = with_gradient(torch.ones(2)), nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        RankFailureError, match="rank 0: parameter 1 of shape \\(3, 2\\): its gradient is sparse"
    ) as info:
        clip_grad_norm_([dense, embedding.weight], 0.5)
    assert set(info.value.failures) == {0}
    assert dense.grad.tolist() == [1.0, 1.0]


def test_a_mesh_of_one_rank(mesh: DeviceMesh) -> None:
    value = torch.arange(6.0).reshape(3, 2)
    sharded = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(value, mesh, [Shard(0)])
    odd = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    odd.grad = distribute_tensor(value.clone(), mesh, [Replicate()])
    norm = clip_grad_norm_([sharded, odd, with_gradient(value)], 1.0)
    assert type(norm) is Tensor
    assert norm.item() == pytest.approx(math.sqrt(3 * 55), rel=1e-6)
    torch.testing.assert_close(sharded.grad.to_local(), value / norm)


def test_without_a_process_group_shards_are_refused(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    torch.distributed.destroy_process_group()
    try:
        with pytest.raises(ScopeError, match="no process group"):
            clip_grad_norm_(param, 1.0)
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
