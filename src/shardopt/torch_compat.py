"""Every private or version-dependent torch call, each with its reason and a test that fails first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardopt.errors import ScopeError

__all__ = [
    "capturing_graph",
    "foreach_norms",
    "foreach_scale",
    "fsdp_offloaded",
    "fsdp_stand_ins",
    "gradients_of",
    "local_box",
    "local_shard",
    "make_wrapper",
    "mesh_ranks",
    "own_store",
    "placed_like",
    "raw_step",
    "refuse_dcp_state_dict",
    "root_mesh_ranks",
    "run_post_hooks",
    "run_pre_hooks",
    "run_wrapper_post_hooks",
    "run_wrapper_pre_hooks",
    "same_spec",
    "set_gradients",
    "shard_in_place",
    "spec_token",
    "stand_in",
    "storage_token",
    "trainable_of",
    "unscale_in_place",
    "versions_of",
    "without_dynamo",
]

_DCP_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_HANDING_ON = ("state", "__getattr__")


def local_shard(tensor: DTensor) -> Tensor:
    """The tensor this rank holds of a DTensor: the object itself, not a view of it.

    ``DTensor.to_local()`` goes through autograd and returns a fresh view each time, which costs 20x
    more in the step and cannot tell whether the shard was replaced (``to_empty``, ``.to(dtype)``).
    """
    local = tensor._local_tensor
    if isinstance(local, AsyncCollectiveTensor):
        return local.wait()
    return local


def same_spec(tensor: DTensor, other: DTensor) -> bool:
    """Whether two DTensors have one mesh and one list of placements.

    FSDP2 gives a gradient the parameter's own spec object, so the identity test nearly always decides.
    """
    if tensor._spec is other._spec:
        return True
    return tensor.placements == other.placements and tensor.device_mesh == other.device_mesh


def gradients_of(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The parameters' gradients, without asking a subclass first whether it overrides ``grad``.

    DTensor does not, and being asked takes it longer than the answer.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [param.grad for param in params]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """The tensors' version counters, without asking whether they override them, as in ``gradients_of``."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor._version for tensor in tensors]


def trainable_of(params: Sequence[Tensor]) -> list[bool]:
    """Which parameters require gradients, without asking whether they override that, as in ``gradients_of``."""
    with torch._C.DisableTorchFunctionSubclass():
        return [param.requires_grad for param in params]


def set_gradients(leaves: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Sets ``grad`` of each leaf, without asking whether it overrides ``grad``, as in ``gradients_of``."""
    with torch._C.DisableTorchFunctionSubclass():
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


# What `local_shard` returns unless the tensor is still on its way to this rank (AsyncCollectiveTensor). Called for
# every parameter in every step, so it is C code: a function of Python costs more than the lookup.
shard_in_place: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")

# An object that stands for the tensor's mesh and placements: the same object, the same placement. Comparing placements
# costs microseconds; a step over a thousand parameters remembers tokens instead.
spec_token: Callable[[DTensor], object] = attrgetter("_spec")


# One kernel for many tensors where a device has one. The public ``torch.nn.utils.get_total_norm`` accumulates in the
# tensors' own dtype, where the norm of a float16 tensor overflows, and wants DTensors or plain ones, not both.
foreach_norms: Callable[..., Sequence[Tensor]] = torch._foreach_norm

# In place, by a number. The public ``torch.nn.utils.clip_grads_with_norm_`` takes parameters, and makes the number.
foreach_scale: Callable[[Sequence[Tensor], float], None] = torch._foreach_mul_  # pyrefly: ignore


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size of this rank's shard in the global tensor, by torch's own chunk rule.

    Private in torch, and the one place that knows ``_StridedShard`` (FSDP over TP on one dim).
    """
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(size)


def make_wrapper(cls: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of ``cls`` that has a shape, a dtype and a device but no memory.

    ``_make_wrapper_subclass`` is how torch builds DTensor itself; there is no public way.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)


def storage_token(tensor: Tensor) -> int:
    """A number that changes when ``tensor.data`` is assigned, also for a DTensor.

    Assigning ``.data`` of a DTensor changes nothing but the wrapper's own (empty) storage, so neither
    ``data_ptr()`` nor the local shard shows it.
    """
    return tensor.untyped_storage()._cdata


def _patched_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """A step that somebody has put on the instance, or None when there is none but a scheduler's.

    A scheduler patches the optimizer it is built on, to note in ``_opt_called`` that it has stepped.
    """
    step = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False) and step.__wrapped__ is type(optimizer).step:  # pyrefly: ignore
        return None
    return step


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The optimizer's update without torch's hook wrapper around it, bound to the optimizer; for one call, now.

    ``Optimizer.profile_hook_step`` wraps ``step`` once per class and runs global and instance hooks in
    it. The wrapper runs those itself, once, while the parameters are still the user's. A step that was
    patched on the instance is called as it is.
    """
    patched = _patched_step(optimizer)
    if patched is not None:
        return patched
    if "step" in vars(optimizer):
        # All that the scheduler's patch would do; without it the scheduler warns that nothing has stepped.
        optimizer._opt_called = True  # pyrefly: ignore[missing-attribute]
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # pyrefly: ignore
    return step.__get__(optimizer, type(optimizer))


# Public torch.compiler.disable imports all of Dynamo when it decorates; this one waits until something compiles.
without_dynamo = torch._disable_dynamo


def run_pre_hooks(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> None:
    """Runs the optimizer's own step pre-hooks, which ``raw_step`` leaves out.

    Raises:
        TypeError: a hook replaces the step's arguments.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    if not hooks or _patched_step(optimizer) is not None:
        return
    for hook in hooks.values():
        if hook(optimizer, _step_arguments(optimizer, closure), {}) is not None:
            raise TypeError(
                f"a step pre-hook of the wrapped {type(optimizer).__name__} returned new arguments; register hooks "
                "that replace arguments on the ShardedStateOptimizer."
            )


def run_post_hooks(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> None:
    """Runs the optimizer's own step post-hooks, which ``raw_step`` leaves out."""
    hooks = optimizer._optimizer_step_post_hooks
    if not hooks or _patched_step(optimizer) is not None:
        return
    for hook in hooks.values():
        hook(optimizer, _step_arguments(optimizer, closure), {})


def run_wrapper_pre_hooks(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs global and own step pre-hooks of an optimizer whose ``step`` torch has not wrapped; the new arguments.

    ``Optimizer.profile_hook_step`` would run them outside of ``step``, before it can catch what they raise. The table
    of global hooks is private; hooks get there by the public ``register_optimizer_step_pre_hook``.

    Raises:
        RuntimeError: a hook returns something else than new arguments and None, as in torch.
    """
    for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
        result: Any = hook(optimizer, args, kwargs)
        if result is None:
            continue
        if not (isinstance(result, tuple) and len(result) == 2):
            raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {result}.")
        args, kwargs = result
    return args, kwargs


def run_wrapper_post_hooks(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs own and global step post-hooks, as ``run_wrapper_pre_hooks`` does those before."""
    for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
        hook(optimizer, args, kwargs)


def capturing_graph() -> bool:
    """Whether the current CUDA stream records a graph: what runs on the host now would not be replayed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def unscale_in_place(gradients: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiplies plain gradients of one device and dtype by ``inv_scale``; sets ``found_inf`` if one is not finite.

    The operator that ``GradScaler`` calls; it has no public name.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, inv_scale)


def _step_arguments(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, ...]:
    # As torch passes them on from optimizer.step() and optimizer.step(closure): with the optimizer itself.
    return (optimizer,) if closure is None else (optimizer, closure)


def own_store(prefix: str) -> dist.Store:
    """A connection of its own to the default process group's store, with a prefix.

    ``ProcessGroup.get_group_store`` is public in name but in no documentation; the other way,
    ``distributed_c10d._get_default_store``, is private.

    Raises:
        ScopeError: there is no default process group, or its store cannot be shared (MPI and fake groups).
        DistNetworkError: the store's host is gone.
    """
    group = dist.group.WORLD
    store = None if group is None else group.get_group_store()
    if store is None:
        raise ScopeError(
            "the ranks have no store to agree over; call torch.distributed.init_process_group with an "
            "init_method (env://, tcp://) or a store first"
        )
    try:
        return dist.PrefixStore(prefix, store.clone())  # pyrefly: ignore[missing-attribute]  # torch's stub omits it
    except dist.DistNetworkError:
        raise
    except (NotImplementedError, RuntimeError) as error:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        raise ScopeError(
            f"the process group's store, a {type(store).__name__}, gives no second connection; call "
            "torch.distributed.init_process_group with init_method='env://' or a TCPStore"
        ) from error


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh, sorted."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def root_mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks, sorted, of the mesh that this one was sliced from; its own when it was not.

    There is no public way from a slice to its root.
    """
    return mesh_ranks(mesh._get_root_mesh())


def refuse_dcp_state_dict() -> None:
    """Raises if the caller was called by ``torch.distributed.checkpoint.state_dict``, or for it.

    Its four functions for optimizers read ``optimizer.state`` first of all, and where that is empty they write zero
    gradients, set ``lr`` to 0 and step. They have no hook by which an optimizer could tell them otherwise.

    Trainers hand them an optimizer of their own, whose ``state`` is this one's.

    Raises:
        TypeError: the caller was; the error says what to call instead.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name in _HANDING_ON and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_globals.get("__name__")
    if caller == _DCP_STATE_DICT:
        raise TypeError(
            f"{caller} does not suit a ShardedStateOptimizer, which it would step to fill: give the optimizer itself "
            "to dcp.save({'optim': optimizer}, ...) and dcp.load, and load what these functions have saved before with "
            "optimizer.prepare_load(path).commit()."
        )


def fsdp_stand_ins() -> dict[int, nn.Parameter]:
    """``id`` of each object that FSDP2 shows in a parameter's place for a while -> the sharded parameter itself.

    Of all modules in the process: a model may be a part of the module that was given to ``fully_shard``.
    From a forward pass to the next ``reshard()`` a module shows whole (or otherwise sharded) parameters; after an
    evaluation the root does so for long. The optimizer holds the sharded ones, and nothing public leads to them
    but a ``reshard()``, which would change the model.
    """
    return {
        id(shown): managed.sharded_param
        for managed in _fsdp_params()
        for shown in (
            getattr(managed, "_unsharded_param", None),  # before the first forward pass there is none
            getattr(managed, "_sharded_post_forward_param", None),
        )
        if shown is not None
    }


def fsdp_offloaded() -> set[int]:
    """``id`` of each parameter that FSDP2 keeps on the host under ``CPUOffloadPolicy``, whatever its mesh's device.

    Of all modules in the process, too. The policy is kept nowhere public.
    """
    return {id(managed.sharded_param) for managed in _fsdp_params() if managed.offload_to_cpu}


def _fsdp_params() -> Iterator[Any]:
    """What FSDP2 knows of each parameter that it manages."""
    # torch's own table of the modules that composable APIs such as fully_shard were called on.
    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch 2.11 has at most one group for a module. Later ones have several, and refuse to name one of them.
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else group.fsdp_params


def stand_in(param: Tensor, data: Tensor) -> nn.Parameter:
    """A leaf over ``data`` that has the attributes users have written on ``param``, and later ones too.

    The two share one dict of attributes: rules read what users have put there, a decay or a scale for the parameter.
    What torch keeps of its own in it is that the tensor is a parameter.
    """
    leaf = nn.Parameter(data, requires_grad=param.requires_grad)
    leaf.__dict__ = vars(param)
    return leaf


def placed_like(param: DTensor, local: Tensor) -> DTensor:
    """A DTensor over ``local`` itself, with the global shape, mesh and placements of ``param``.

    ``DTensor.from_local`` moves a tensor to the mesh's device first. Under ``CPUOffloadPolicy`` that makes a copy on
    the accelerator, and what is read into it or written to it never reaches the tensor on the host.
    """
    meta = TensorMeta(param.shape, param.stride(), local.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    return DTensor(local.detach(), spec, requires_grad=False)
