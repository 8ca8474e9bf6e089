"""When the ranks of an optimizer vote, and what on."""

from __future__ import annotations

from shardopt.scope import Scope
from shardopt.staging.poison import fingerprint

__all__ = ["Consensus", "check_options"]

_MODES = ("every-step", "checkpoint", "off")
_PLAIN = ("replicated", "per_rank")


def check_options(mode: str, vote_timeout_s: float, plain: str) -> None:
    """Raises ValueError unless the options of a wrapper are known and its time-out is positive."""
    if plain not in _PLAIN:
        raise ValueError(f"plain={plain!r} is unknown; expected one of {', '.join(map(repr, _PLAIN))}.")
    if mode not in _MODES:
        raise ValueError(f"consensus={mode!r} is unknown; expected one of {', '.join(map(repr, _MODES))}.")
    if isinstance(vote_timeout_s, bool) or not isinstance(vote_timeout_s, (int, float)) or not vote_timeout_s > 0:
        raise ValueError(f"vote_timeout={vote_timeout_s!r} must be a positive number of seconds.")


class Consensus:
    """The votes of one optimizer's ranks.

    Attributes:
        mode: ``"every-step"``, ``"checkpoint"`` or ``"off"``.
        scope: the ranks.
    """

    def __init__(self, mode: str, scope: Scope) -> None:
        self.mode = mode
        self.scope = scope

    @property
    def votes(self) -> bool:
        """Whether there are votes at all."""
        return self.mode != "off"

    def vote(
        self,
        operation: str,
        failure: BaseException | None,
        *,
        every_step: bool = False,
        digest: bytes = b"",
        facts: int = 0,
    ) -> int:
        """Collective. Makes one rank's failure everybody's.

        Args:
            operation: what the ranks are about to do.
            failure: why this rank cannot.
            every_step: whether this happens in every step, and is voted on in that mode only.
            digest: what has to be equal, of any length.
            facts: 64 flags.

        Returns:
            All ranks' facts; 0 when there was no vote, for then ranks have none in common.

        Raises:
            RankFailureError: another rank has failed, or ranks differ.
            BaseException: ``failure``.
        """
        agreed = 0
        if self.mode == "every-step" or (self.mode == "checkpoint" and not every_step):
            agreed = self.scope.vote(
                operation, problem=failure, digest=b"" if failure else fingerprint(digest), facts=facts
            )
        if failure is not None:
            raise failure
        return agreed
