"""Which ranks hold the parameters, and how they agree: meshes to ranks, votes, exchanges, deadlines."""

from shardopt.scope.differences import differences
from shardopt.scope.ranks import ranks_of
from shardopt.scope.scope import Scope

__all__ = ["Scope", "differences", "ranks_of"]
