"""What a mutant has in the place of a vote: each rank for itself."""

from __future__ import annotations

from typing import Any

__all__ = ["alone"]


def alone(name: str, owner: Any, operation: str, *args: Any, problem: Any = None, facts: int = 0, **_: Any) -> Any:
    """What the call ``owner.name(operation, *args, ...)`` gives a rank that asks nobody.

    A rank with a problem raises it. The first rank gathers its own payload in the place of each; of a scatter the
    others get nothing.
    """
    if name == "vote" and args:
        problem = args[0]
    if isinstance(problem, BaseException):
        raise problem
    if name == "vote":
        return facts
    if name == "exchange":
        return list(args) * owner.size
    if name == "gather":
        return list(args) * owner.size if owner.index == 0 else []
    return args[0][0] if args[0] else b""
