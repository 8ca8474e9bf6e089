"""``SwapAdamW``: AdamW whose state lies in slabs on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardopt.errors import PlacementError, PresentationError, RankFailureError, ShardoptError
from shardopt.presentation.own_shards import TakesShards
from shardopt.presentation.presentation import amp_scale, drop_amp_scale
from shardopt.swap.engines import EngineOptions, make_engine
from shardopt.swap.folded_clip import fold_clip
from shardopt.swap.gradients import Found
from shardopt.swap.held import Keeps, shard_of
from shardopt.swap.loading import plan_load
from shardopt.torch_compat import without_dynamo

__all__ = ["SwapAdamW"]

_CHUNK_BYTES = 16 << 20


class SwapAdamW(torch.optim.Optimizer, TakesShards):
    """AdamW whose state is on the host, for DTensors or plain tensors, in float32 or bfloat16.

    Parameters on the host are updated in one pass over memory per step, in C++. For parameters on a GPU, chunks of
    state stream through a few slots of device memory, where a Triton kernel steps them; no part of that has run on a
    GPU yet. The bits are the same on every CPU, for any number of threads and of ranks, and on a device.

    The state is made with the optimizer, in memory of exactly that size, and stays there: steps and loads write into
    it and make no other. ``state`` holds it under the names of ``torch.optim.AdamW``, as DTensors placed like their
    parameters, so the two load each other's state. Alone, a step that raises on one rank says nothing to the others;
    inside a ``ShardedStateOptimizer`` all ranks step or none. Make it after ``fully_shard``.

    Args:
        params: as of any torch optimizer.
        lr: a number, or a tensor of one element; read anew in every step, as everything in the groups.
        betas: decays of the moments.
        eps: added to the denominator.
        weight_decay: decoupled.
        amsgrad: whether maxima of the second moment are kept; a group that is made without cannot turn it on.
        maximize: whether to go up.
        moment_dtype: ``torch.float32``, or ``torch.bfloat16``, which is rounded at random, so that a moment decays
            however small the change; the random bits depend on the seed, the step, the parameter and the element.
        master: of bfloat16 parameters: ``"fp32"`` for their values in float32, ``"remainder16"`` for what bfloat16
            lacks of them in 16 bits, exactly; None rounds every step to the nearest bfloat16.
        pin_memory: whether the slabs are registered with CUDA. ``"auto"`` registers them where parameters are on a GPU.
        chunk_bytes: of state that is copied to a GPU at a time, at most; of no account on the host.
        device_budget_bytes: of GPU memory for state that stays there, besides three chunks and some tables.
        seed: of the random bits; the same on every rank, and in every run that continues this one.
        num_threads: at most so many step; None takes the CPUs that this process may use, shared among the ranks of
            this machine (``LOCAL_WORLD_SIZE``). ``OMP_NUM_THREADS`` has no say.

    Raises:
        PlacementError: parameters are on different devices, or not of a kind that can be updated; all are listed.
        ImportError: parameters are on a GPU, and triton cannot be imported.
        ValueError, TypeError: an option is out of range.
    """

    # GradScaler asks by this name; the scale is folded into the step, which reads gradients once.
    _step_supports_amp_scaling = True
    # What a load reads goes straight there.
    state_device = torch.device("cpu")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        moment_dtype: torch.dtype = torch.float32,
        master: str | None = None,
        pin_memory: bool | str = "auto",
        chunk_bytes: int = _CHUNK_BYTES,
        device_budget_bytes: int = 0,
        seed: int = 0,
        num_threads: int | None = None,
    ) -> None:
        _check_options(pin_memory, chunk_bytes, device_budget_bytes, seed, num_threads)
        options = EngineOptions(
            Keeps(moment_dtype=moment_dtype, master=master),
            pin=pin_memory,
            seed=seed,
            num_threads=num_threads,
            chunk_bytes=chunk_bytes,
            budget_bytes=device_budget_bytes,
        )
        self._found: Found | None = None
        self._added: list[tuple[str, Tensor, bool]] | None = []
        self.told = {"moment_dtype": str(moment_dtype), "master": str(master), "seed": str(seed)}
        # torch's AdamW has the last one in its groups too, where it tells it from Adam.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)
        # All groups in one slab: each of its own would be rounded up to whole pages.
        added, self._added = self._added or [], None
        self._engine = make_engine(_device_of(added), options)
        self._engine.add(added, self.param_groups, self._state)

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state, on the host. Reading this waits until all of it is there; what is kept of it goes stale."""
        # The base class makes it, before there is anything to wait for.
        if "_engine" in vars(self):
            self._engine.drain()
        return self._state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._state = value

    @property
    def master(self) -> str | None:
        """What stands behind bfloat16 parameters."""
        return self._engine.keeps.master

    @property
    def moment_dtype(self) -> torch.dtype:
        """Of all moments."""
        return self._engine.keeps.moment_dtype

    @property
    def slab_bytes(self) -> int:
        """Bytes of host memory that the state was given: moments, maxima and masters."""
        return self._engine.slabs.nbytes

    @property
    def has_written(self) -> bool:  # type: ignore[override]
        """Whether the last step may have changed something."""
        return self._engine.has_written

    @without_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and makes the state of its parameters.

        Raises:
            PlacementError: a parameter cannot be updated here; nothing was added.
        """
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            named = _named(len(self.param_groups) - 1, group)
            if len({id(param) for _, param, _ in named}) != len(named):
                raise PresentationError(f"group {len(self.param_groups) - 1} holds a parameter twice; list it once.")
            if self._added is None:
                self._engine.add(named, self.param_groups, self._state)
            else:
                self._added += named
        except BaseException:
            self.param_groups.pop()
            raise

    @without_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. Collective only where a gradient is a DTensor placed unlike its parameter, as torch's own is.

        A parameter without a gradient is left alone: no decay, no count.

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients enabled.

        Raises:
            ShardoptError: the step cannot run, or an earlier one has failed half way.
        """
        self._engine.has_written = False
        try:
            return self._step(closure)
        except BaseException:
            # GradScaler takes its numbers off after a step that returns; the next one would multiply them.
            drop_amp_scale(self)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found, self._found = self._found, None
        if found is None:
            found = self._engine.look(self.param_groups, self._state)
        self._engine.update(found, self.param_groups, amp_scale(self))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, and drops the factor of a clip that no step has used."""
        self._engine.clip = None
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Collective. Makes the next step take gradients whose norm, over all ranks, is at most ``max_norm``.

        As ``shardopt.clip_grad_norm_(optimizer, ...)``, but gradients are read once and not written: ``param.grad``
        stays as it is, and the next ``step`` multiplies. It must be the step of these gradients: if they change in
        between, it raises. ``zero_grad`` drops the factor, another call replaces it.

        Returns:
            The norm of the gradients as they are.

        Raises:
            ValueError, TypeError, ScopeError, RankFailureError, RuntimeError: as ``shardopt.clip_grad_norm_``.
        """
        problem: ShardoptError | None = None
        try:
            self._engine.check(self.param_groups, self._state)
        except ShardoptError as error:
            # The others are told, and do not wait.
            problem = error
        try:
            return fold_clip(self._engine, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, problem=problem)
        except RankFailureError as verdict:
            if problem is not None:
                raise problem from verdict
            raise

    def refresh_masters(self) -> None:
        """Makes every master the parameter's own value: for weights that were written through ``.data``."""
        self._engine.refresh_masters()

    @without_dynamo
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """As of any torch optimizer; the tensors are the live ones."""
        self._engine.poison.check()
        self.settle()
        return super().state_dict()

    @without_dynamo
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Copies what this class or ``torch.optim.AdamW`` has saved into the memory of the state.

        Nothing is converted, and nothing changes unless all of it fits. Where masters were not saved they become the
        parameters' values; a parameter without state in it starts anew.

        Raises:
            LoadError: it does not fit; every problem is listed.
        """
        loaded: Any = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, loaded)
            loaded = loaded if changed is None else changed
        self._engine.check(self.param_groups, self._state)
        # What is loaded may be the live state itself.
        self._engine.drain()
        plan = plan_load(self._engine, self.param_groups, loaded)
        self._engine.clip = None
        self._found = None
        try:
            plan.commit()
        except BaseException as error:
            self._engine.poison.set("load", error)
            raise
        self._engine.poison.reason = None
        self._engine.masters.note_loaded()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Takes names for errors."""
        self._engine.name(names)

    def look(self) -> list[str]:
        """Checks the step that follows; see ``TakesShards``."""
        self._found = self._engine.look(self.param_groups, self._state)
        return [self._engine.held[index].name for index in self._found.unaligned]

    def forget(self) -> None:
        """Drops what ``look`` has found."""
        self._found = None

    def withdraw(self, params: Sequence[Tensor]) -> None:
        """Drops what was made for parameters that were added last."""
        self._engine.withdraw(params)

    def settle(self) -> None:
        """Brings masters up to weights that were written since the last step.

        Masters that were loaded since then wait for the weights of their checkpoint until the step.
        """
        if self._engine.poison.reason is None and not self._engine.masters.loaded:
            self._engine.check(self.param_groups, self._state)
            self._engine.follow()
        self._engine.drain()

    def state_replaced(self) -> None:
        """Takes what a load has put into the state into its memory."""
        self._engine.clip = None
        self._engine.poison.reason = None
        try:
            self._engine.adopt(self._state)
        except PlacementError as error:
            # The load is done, or has failed half way, and has its own error; from here on no step may run.
            self._engine.poison.set("load", error)
        self._engine.masters.note_loaded()

    def _refuse_copy(self, *args: Any) -> NoReturn:
        raise TypeError(
            "a SwapAdamW cannot be copied or pickled: its state is memory that belongs to live parameters. Save its "
            "state_dict(), or build a new one over the other model and load that."
        )

    __copy__ = __deepcopy__ = __reduce_ex__ = __getstate__ = __setstate__ = _refuse_copy  # pyrefly: ignore


def _device_of(named: Sequence[tuple[str, Tensor, bool]]) -> torch.device:
    """Where the first parameter that is anywhere is: all of them have to be there."""
    devices = (shard_of(param).device for _, param, _ in named)
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _named(index: int, group: Mapping[str, Any]) -> list[tuple[str, Tensor, bool]]:
    """The group's parameters with what errors call them, and whether it keeps maxima."""
    names = group.get("param_names") or [
        f"group {index}, parameter {place} of shape {tuple(param.shape)}" for place, param in enumerate(group["params"])
    ]
    return [(name, param, bool(group["amsgrad"])) for name, param in zip(names, group["params"], strict=True)]


def _check_options(
    pin_memory: object, chunk_bytes: int, device_budget_bytes: int, seed: int, num_threads: int | None
) -> None:
    problems: list[str] = []
    if pin_memory not in (True, False, "auto"):
        problems.append(f"pin_memory is {pin_memory!r}; expected True, False or 'auto'")
    if chunk_bytes < 1:
        problems.append(f"chunk_bytes is {chunk_bytes!r}; it must be at least 1")
    if device_budget_bytes < 0:
        problems.append(f"device_budget_bytes is {device_budget_bytes!r}; it must not be negative")
    if not 0 <= seed < 1 << 64:
        problems.append(f"seed is {seed!r}; it must be a number of 64 bits")
    if num_threads is not None and num_threads < 1:
        problems.append(f"num_threads is {num_threads!r}; it must be at least 1, or None")
    if problems:
        raise ValueError("; ".join(problems))
