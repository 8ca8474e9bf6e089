"""``ShardedStateOptimizer``: any torch optimizer with portable, resharding, staged state."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardopt.errors import PresentationError
from shardopt.layouts.tracked import Tracked
from shardopt.portable.live import live_tensors
from shardopt.portable.reader import read_checkpoint
from shardopt.presentation.assembly import explain, track_group
from shardopt.presentation.joined_state import JoinedState
from shardopt.presentation.presentation import amp_scale, drop_amp_scale
from shardopt.staging.construction import construct
from shardopt.staging.fingerprint import Fingerprint
from shardopt.staging.offer import Offers
from shardopt.staging.options import LoadOptions
from shardopt.staging.poison import Poison
from shardopt.staging.prepare import Plan, prepare
from shardopt.staging.prepared import PreparedLoad, agree
from shardopt.staging.stepping import Stepping
from shardopt.torch_compat import capturing_graph, refuse_dcp_state_dict, without_dynamo

__all__ = ["ShardedStateOptimizer"]

_LOG = logging.getLogger(__name__)
_STEP = "Optimizer.step#ShardedStateOptimizer.step"
_NOTHING_READ = (
    "nothing was read into the state dict that is loaded: it is this optimizer's own and puts back what was there. "
    "After a dcp.load with allow_partial_load=True that means the checkpoint has no optimizer under this key."
)


class ShardedStateOptimizer(torch.optim.Optimizer):
    """Wraps torch optimizers under FSDP2 so that their state can be saved and loaded on any number of ranks.

    It steps exactly as the wrapped optimizers do. ``state_dict()`` is flat, named by parameter and in
    global coordinates, for stock ``torch.distributed.checkpoint``; loads are checked on every rank before
    any rank changes anything.

    ``param_groups`` and ``state`` are the wrapped optimizer's own objects. With several wrapped optimizers
    they are joined views whose groups and entries are the wrapped ones' own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        model: nn.Module | Sequence[nn.Module],
        *,
        compute: str = "auto",
        consensus: str = "every-step",
        vote_timeout: float = 600.0,
        plain: str = "replicated",
        layouts: Mapping[str, str] | None = None,
    ) -> None:
        """Collective. Wraps ``optimizer``, whose parameters are those of ``model``, after ``fully_shard``.

        Reads and names; steps nothing, and creates no state.

        Args:
            optimizer: one torch optimizer or several with disjoint parameters.
            model: the module or modules that hold the parameters; names are theirs, else the optimizer's own.
            compute: what the optimizer sees while it steps: ``"local"`` (this rank's shards), ``"owner"`` (whole
                parameters, each on one rank), ``"replicated"`` (everything, on every rank), ``"dtensor"`` (the
                DTensors), or ``"auto"``, the cheapest of the first three that gives what an unsharded run gives.
            consensus: when ranks vote: ``"every-step"``, ``"checkpoint"`` (state_dict and loads only), or ``"off"``.
            vote_timeout: seconds after which a rank that does not vote is an error on every other.
            plain: what the state of parameters that are not sharded is, where others are: ``"replicated"``,
                the same on every rank (checked); or ``"per_rank"``, each rank's own, for as many ranks only.
            layouts: where state belongs that cannot be placed otherwise; see ``register_layouts``.

        Raises:
            NamingError: a parameter is in none of the models and has no name, or two share a name.
            PlacementError: a parameter or its existing state has no known place, or is on a device its mesh is not.
            PresentationError: ``compute`` does not suit the optimizer's class.
            ScopeError: the ranks that hold the parameters cannot be joined.
        """
        # Optimizer.__init__ would make groups and state of its own, and wrap step; only the hooks are wanted.
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._inventory, self._consensus = construct(
            optimizer,
            model,
            ShardedStateOptimizer,
            compute=compute,
            mode=consensus,
            vote_timeout_s=vote_timeout,
            plain=plain,
            layouts=layouts,
        )
        self._models = self._inventory.models
        self._scope = self._consensus.scope
        self._changes = 0
        self._prepared = 0
        self._poison = Poison()
        self._stepping = Stepping(self._inventory, self._consensus, self._poison, self._note_change)
        self._offers = Offers(self._inventory, self._consensus, self._poison)
        self._joined_groups: list[dict[str, Any]] = self._inventory.groups()
        self._joined_state = JoinedState(self._inventory)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The wrapped optimizers."""
        return [part.inner for part in self._inventory.parts]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's own list of groups (of several: a list of their own dicts)."""
        parts = self._inventory.parts
        if len(parts) == 1:
            return parts[0].inner.param_groups
        self._joined_groups[:] = self._inventory.groups()
        return self._joined_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's own state, keyed by the user's parameters (of several: a joined view)."""
        refuse_dcp_state_dict()
        parts = self._inventory.parts
        return parts[0].inner.state if len(parts) == 1 else self._joined_state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults (of several: the keys they share, with the first one's values)."""
        first, *others = self.optimizers
        if not others:
            return first.defaults
        return {k: v for k, v in first.defaults.items() if all(k in other.defaults for other in others)}

    # GradScaler asks by this name whether to leave skipping to the step, where all ranks decide as one.
    _step_supports_amp_scaling = True

    def unscale(self, inverse: Tensor, *, half: bool) -> dict[torch.device, Tensor]:
        """Collective. Multiplies gradients by ``inverse``, of GradScaler's scale, and agrees on an overflow.

        Args:
            inverse: one element, float32.
            half: whether float16 gradients are allowed.

        Returns:
            By device, a 0-d float32 tensor: 1.0 if any rank has an infinity or NaN, else 0.0.

        Raises:
            RankFailureError: a rank has a float16 gradient and ``half`` is False.
        """
        return self._stepping.unscale(inverse, half=half)

    @without_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Collective. Runs one update of every wrapped optimizer, on every rank or on none.

        Args:
            closure: re-evaluates the model and returns the loss, as does ``step``; called once, with gradients enabled.

        Raises:
            RankFailureError: another rank failed before the update.
        """
        if capturing_graph():
            raise PresentationError("step: votes are not replayed with a CUDA graph; step outside of its capture.")
        try:
            with torch.profiler.record_function(_STEP):
                return self._stepping.run(self, closure, amp_scale(self))
        except BaseException:
            drop_amp_scale(self)
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, by the wrapped optimizers' own ``zero_grad``."""
        for inner in self.optimizers:
            inner.zero_grad(set_to_none)

    @without_dynamo
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Collective. The portable state: handles by ``state.<fqn>.<entry>``, and a manifest.

        Give the optimizer itself to ``dcp.save`` and ``dcp.load``, which call this. Nothing is created,
        stepped or copied; a save reads live memory. The keys depend on the optimizer's class and options
        and on the parameters, never on history.

        Raises:
            PlacementError: a state entry has no known place; all of them are listed.
            RankFailureError: that is so on another rank, or ranks differ in what must be the same.
        """
        return self._offers.make(self, partial(self._changed_since, self._changes))

    @without_dynamo
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Collective. Prepares, agrees and commits a load of what ``state_dict()`` returned and DCP filled.

        Raises:
            LoadError: the state does not fit; every problem is listed and nothing was changed.
            RankFailureError: that is so on another rank; nothing was changed here either.
        """

        def hooked(_: LoadOptions) -> Any:
            loaded: Any = dict(state_dict)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, loaded)
                loaded = loaded if changed is None else changed
            return loaded

        self._prepare(hooked).commit()

    @without_dynamo
    def prepare_load(
        self,
        state_dict: Mapping[str, Any] | str | os.PathLike[str],
        *,
        prefix: str | None = None,
        strict: bool = True,
        fresh: Iterable[str] = (),
        hyperparameters: str | Mapping[str, Any] = "checkpoint",
        dtype: str = "same",
        finite: str = "error",
    ) -> PreparedLoad:
        """Collective. Checks a load on every rank and changes nothing.

        Args:
            state_dict: what ``state_dict()`` returned and DCP filled, or the directory of a checkpoint.
            prefix: with a directory, the key under which the optimizer was saved; needed only when it
                holds several.
            strict: False takes what both sides have; what only one side has is in the report. It relaxes
                names and nothing else, and a load that matches nothing is an error all the same.
            fresh: patterns of FQNs (``"head.*"``) whose parameters start anew, whatever the checkpoint has.
            hyperparameters: ``"checkpoint"``; ``"keep"`` for the live values of all groups; or a dict of
                values that take the place of the saved ones in every group, ``{"lr": 1e-4}``.
            dtype: ``"same"``, or ``"live"`` to convert floating-point state to what this optimizer keeps.
            finite: ``"error"`` refuses infinities and NaNs in state, ``"report"`` notes them.

        Returns:
            The prepared load, with its report; ``commit()`` puts it in place.

        Raises:
            LoadError: the state does not fit; every problem is listed.
            RankFailureError: that is so on another rank.
            ValueError, TypeError: an option is unknown.
        """

        def source(options: LoadOptions) -> Mapping[str, Any]:
            if isinstance(state_dict, Mapping):
                return state_dict
            wanted = {fqn: one for fqn, one in self._inventory.by_fqn.items() if not options.is_fresh(one.name)}
            return read_checkpoint(state_dict, wanted, prefix=prefix, own_index=self._inventory.place)

        return self._prepare(
            source,
            lambda: LoadOptions.of(
                strict=strict, fresh=fresh, hyperparameters=hyperparameters, dtype=dtype, finite=finite
            ),
        )

    def _prepare(
        self, source: Callable[[LoadOptions], Mapping[str, Any]], make_options: Callable[[], LoadOptions] = LoadOptions
    ) -> PreparedLoad:
        plan: Plan | None = None
        options: LoadOptions | None = None
        failure: BaseException | None = None
        try:
            options = make_options()
            plan = prepare(self._inventory, source(options), options)
        except BaseException as error:
            failure = error
        plan = agree(self._scope, plan, failure, options=options, voting=self._consensus.votes)
        self._prepared += 1
        if plan.lender is not None and getattr(plan.lender.outdated.value, "func", None) == self._changed_since:
            plan.report.notes.append(_NOTHING_READ)
            _LOG.warning(_NOTHING_READ)
        return PreparedLoad(
            plan,
            self._scope,
            fingerprint=lambda: Fingerprint.of(self._inventory, self._changes + self._prepared),
            check_identity=self._inventory.check_groups,
            voting=self._consensus.votes,
            committed=self._committed,
        )

    @without_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective. Adds a group to the wrapped optimizer; its parameters must be in the models.

        Raises:
            NamingError: a parameter is in none of the models; nothing was added.
            ScopeError: the parameters live on other ranks than the optimizer's.
            PresentationError: there are several wrapped optimizers.
        """
        if len(self._inventory.parts) != 1:
            raise PresentationError(
                "add_param_group cannot tell which of several optimizers gets the group; add it to that optimizer and "
                "wrap them again."
            )
        inner = self._inventory.parts[0].inner
        num_groups, held = len(inner.param_groups), set(inner.state)
        failure: BaseException | None = None
        tracked: list[Tracked] = []
        try:
            tracked = track_group(param_group, self._inventory, self._models, self._scope)
            inner.add_param_group(param_group)
            self._inventory.check(tracked)
        except BaseException as error:
            failure = error
        presentation = self._inventory.parts[0].presentation
        names = "\n".join(item.fqn + presentation.described(item) for item in tracked).encode()
        try:
            self._consensus.vote("add_param_group", failure, digest=names)
        except BaseException:
            added = [
                param for group in inner.param_groups[num_groups:] for param in group["params"] if param not in held
            ]
            for param in added:
                inner.state.pop(param, None)
            del inner.param_groups[num_groups:]
            presentation.withdraw(added)
            raise
        self._changes += 1
        self._inventory.add(tracked)

    def sharded_state(self) -> dict[str, Tensor]:
        """Element-wise state as DTensors over live memory, by key; plain tensors for plain parameters.

        Plain too, and whole, under ``owner`` and ``replicated``: of the parameters whose state this rank keeps.
        Not collective; nothing is copied. Writing to a value writes to the optimizer's state.
        """
        return live_tensors(self._inventory)

    def explain(self) -> str:
        """Which presentation each wrapped optimizer steps in, and why. Not collective, no effects."""
        said = self._stepping.presence.said()
        return explain(self._inventory, self._scope, self._consensus.mode) + f"\n{said}" * bool(said)

    def __repr__(self) -> str:
        inners = ", ".join(repr(inner) for inner in self.optimizers)
        return f"{type(self).__name__}(\n{self.explain()}\n{inners}\n)"

    def _refuse_copy(self, *args: Any) -> NoReturn:
        raise TypeError(
            "a ShardedStateOptimizer cannot be copied or pickled: it belongs to live parameters and to a scope of "
            "ranks. Save it with dcp.save({'optim': optimizer}, ...), or build a new one over the other model."
        )

    __copy__ = __deepcopy__ = __reduce_ex__ = __getstate__ = __setstate__ = _refuse_copy  # pyrefly: ignore

    def _note_change(self) -> None:
        self._changes += 1

    def _changed_since(self, changes: int) -> bool:
        return self._changes != changes

    def _committed(self, failure: BaseException | None) -> None:
        self._loaded(failure)
        if failure is None:
            self._run_load_hooks()

    def _run_load_hooks(self) -> None:
        # Those of the wrapped optimizers too: their state is new, whichever way it came.
        for optimizer in (*self.optimizers, self):
            for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
                post_hook(optimizer)

    def _loaded(self, failure: BaseException | None) -> None:
        self._changes += 1
        for part in self._inventory.parts:
            part.presentation.state_changed()
        self._poison.reason = None
        if failure is not None:
            self._poison.set("load", failure)
