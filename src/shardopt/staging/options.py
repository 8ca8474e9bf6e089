"""What a load may do beyond putting everything back as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from shardopt.naming import Name

__all__ = ["EXACT", "LoadOptions"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of one load; the defaults put back exactly what was saved, or refuse.

    Attributes:
        strict: whether every name must be on both sides.
        fresh: patterns (``*``, ``?``, ``[...]``) of FQNs that start anew.
        hyperparameters: ``"checkpoint"``, ``"keep"``, or values that take the place of the saved ones in every group.
        dtype: ``"same"``, or ``"live"`` to convert state to the dtype this optimizer keeps.
        finite: ``"error"`` or ``"report"``, for state with infinities or NaNs.
    """

    strict: bool = True
    fresh: tuple[str, ...] = ()
    hyperparameters: str | Mapping[str, Any] = field(default="checkpoint")
    dtype: str = "same"
    finite: str = "error"

    @classmethod
    def of(
        cls,
        *,
        strict: bool,
        fresh: Iterable[str],
        hyperparameters: str | Mapping[str, Any],
        dtype: str,
        finite: str,
    ) -> LoadOptions:
        """The options, checked.

        Raises:
            TypeError: an option has the wrong type.
            ValueError: it has the right type and an unknown value.
        """
        if not isinstance(strict, bool):
            raise TypeError(f"strict={strict!r} must be True or False.")
        # Once: a generator is empty after a look at it.
        patterns = () if isinstance(fresh, str) else tuple(fresh)
        if isinstance(fresh, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"fresh={fresh!r} must be a list of patterns, like ['head.*'].")
        if not isinstance(hyperparameters, Mapping):
            _one_of("hyperparameters", hyperparameters, ("checkpoint", "keep"), " or a dict of values")
        elif not all(isinstance(key, str) for key in hyperparameters):
            raise TypeError(f"hyperparameters={hyperparameters!r}: the keys of a group are strings.")
        elif set(hyperparameters) & {"params", "param_names"}:
            raise ValueError("hyperparameters cannot set 'params': a load does not move parameters between groups.")
        _one_of("dtype", dtype, ("same", "live"))
        _one_of("finite", finite, ("error", "report"))
        return cls(strict, patterns, hyperparameters, dtype, finite)

    def spelled(self) -> str:
        """The options as text that is equal on two ranks if they are, tensors to the last bit."""
        given = self.hyperparameters
        values = given if isinstance(given, str) else [(key, _spelled(given[key])) for key in sorted(given)]
        # A set is in another order on each rank.
        return repr((self.strict, sorted(self.fresh), values, self.dtype, self.finite))

    def is_fresh(self, name: Name) -> bool:
        """Whether the parameter starts anew: by any of its names, if it is tied."""
        return bool(self.fresh) and any(fnmatchcase(one, pattern) for one in name.all for pattern in self.fresh)

    def idle_patterns(self, names: Iterable[Name]) -> list[str]:
        """Patterns of ``fresh`` that match none of the names."""
        known = [one for name in names for one in name.all]
        return [pattern for pattern in self.fresh if not any(fnmatchcase(one, pattern) for one in known)]


def _spelled(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.tolist()}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}{[_spelled(item) for item in value]}"
    return repr(value)


EXACT = LoadOptions()
"""Everything back as it was saved, or a refusal."""


def _one_of(option: str, value: object, known: tuple[str, ...], more: str = "") -> None:
    if value not in known:
        raise ValueError(f"{option}={value!r} is unknown; expected {' or '.join(map(repr, known))}{more}.")
