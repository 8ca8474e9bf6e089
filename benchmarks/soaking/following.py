"""The oracle of rules whose kernels round the ends of a tensor otherwise: unsharded, updated in the legs' pieces."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.soaking.episode import Episode
from benchmarks.soaking.leg import quiet, schedulers_of
from benchmarks.soaking.rules import RULES
from benchmarks.soaking.training import Held, Training

__all__ = ["Way", "follow"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a leg went.

    Attributes:
        begin: the step it resumed from.
        end: the most steps it came to.
        ranks: for each, by parameter, the numbers of its elements in the shape of its shard; none if each parameter was
            updated whole.
    """

    begin: int
    end: int
    ranks: tuple[dict[str, Tensor], ...]


@dataclass
class _Pieces:
    index: dict[str, Tensor]
    params: dict[str, nn.Parameter]
    optimizers: list[torch.optim.Optimizer]


def follow(episode: Episode, ways: Sequence[Way]) -> dict[int, Held]:
    """What the run holds in the last of the ways, by number of steps.

    No communication and nothing of shardopt: the bare optimizer updates each rank's pieces as tensors of their own, so
    that it rounds as it does there, and the whole is put together from them after each step.
    """
    with quiet():
        run = _Run(episode)
        found: dict[int, Held] = {}
        saved = {0: run.saved()}
        for way in ways:
            run.resume(saved[way.begin])
            cut = [run.cut(index) for index in way.ranks]
            saved = {way.begin: run.saved()}
            found = {way.begin: run.held(way.begin)}
            for step in range(way.begin, way.end):
                run.step(step, cut)
                saved[step + 1], found[step + 1] = run.saved(), run.held(step + 1)
        return found


class _Run:
    """The whole parameters, and optimizers that hold the whole state."""

    def __init__(self, episode: Episode) -> None:
        self._rule = RULES[episode.rule]
        self._training = Training(episode, None, "start")
        self._params = self._training.params
        self._optimizers = self._training.optimizers()
        self._schedulers = schedulers_of(self._optimizers)
        self._names = {param: name for name, param in self._params.items()}

    def held(self, step: int) -> Held:
        return self._training.held(step, self._optimizers, state=True)

    def saved(self) -> Any:
        return copy.deepcopy(
            {
                "params": {name: param.detach() for name, param in self._params.items()},
                "state": [
                    {self._names[param]: entries for param, entries in one.state.items()} for one in self._optimizers
                ],
                "groups": [[_values(group) for group in one.param_groups] for one in self._optimizers],
                "schedulers": [one.state_dict() for one in self._schedulers],
            }
        )

    def resume(self, saved: Any) -> None:
        saved = copy.deepcopy(saved)
        with torch.no_grad():
            for name, value in saved["params"].items():
                self._params[name].copy_(value)
        for one, state, groups in zip(self._optimizers, saved["state"], saved["groups"], strict=True):
            one.state.clear()
            one.state.update({self._params[name]: entries for name, entries in state.items()})
            for group, values in zip(one.param_groups, groups, strict=True):
                group.update(values)
        for scheduler, state in zip(self._schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def cut(self, index: dict[str, Tensor]) -> _Pieces:
        """A rank's parameters and state."""
        params = {
            name: nn.Parameter(param.detach().reshape(-1)[index[name]], requires_grad=param.requires_grad)
            for name, param in self._params.items()
        }
        optimizers = self._rule.make(list(params.values()))
        for whole, one in zip(self._optimizers, optimizers, strict=True):
            for param, entries in whole.state.items():
                name = self._names[param]
                one.state[params[name]] = {
                    entry: value.reshape(-1)[index[name]] if value.dim() else value.clone()
                    for entry, value in entries.items()
                }
        return _Pieces(index, params, optimizers)

    def step(self, step: int, cut: Sequence[_Pieces]) -> None:
        self._training.give_gradients(step)
        for pieces in cut:
            self._step_pieces(pieces)
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            if not cut:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def _step_pieces(self, pieces: _Pieces) -> None:
        for name, piece in pieces.params.items():
            grad = self._params[name].grad
            piece.grad = grad.reshape(-1)[pieces.index[name]] if grad is not None and piece.numel() else None
        for whole, one in zip(self._optimizers, pieces.optimizers, strict=True):
            for group, shown in zip(whole.param_groups, one.param_groups, strict=True):
                shown.update(copy.deepcopy(_values(group)))
            one.step()
            for name, piece in pieces.params.items():
                # An empty one took no step, and what it had is of the leg's beginning.
                for entry, value in one.state.get(piece, {}).items() if piece.numel() else ():
                    self._put(whole.state[self._params[name]], entry, value, name, pieces.index[name])
        for name, piece in pieces.params.items():
            self._params[name].view(-1)[pieces.index[name]] = piece.detach()

    def _put(self, entries: dict[str, Any], entry: str, value: Tensor, name: str, index: Tensor) -> None:
        if not value.dim():
            entries[entry] = value.clone()
            return
        if entry not in entries:
            entries[entry] = torch.zeros(self._params[name].shape, dtype=value.dtype)
        entries[entry].view(-1)[index] = value


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
