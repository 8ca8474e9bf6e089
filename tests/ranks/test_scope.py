"""Scopes between processes: how ranks find each other, what refuses, several at once, exchanges, meshes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt.errors import RankFailureError, ScopeError
from shardopt.scope import Scope, ranks_of
from shardopt.torch_compat import own_store
from tests.support.ranks import RankPool, reached, wait_until_reached

SHORT_S = 2.0  # a deadline that the test means to miss; long enough for the other ranks of a busy machine
LONG_S = 60.0  # one that no test comes near, so that who waits for it fails by the job's deadline
CHUNK_BYTES = 4 << 20


def refusal(ranks: Sequence[int], *, timeout_s: float = LONG_S, name: str = "optimizer") -> str:
    try:
        Scope.over(ranks, timeout_s=timeout_s, name=name)
    except ScopeError as error:
        return str(error)
    raise AssertionError("the scope must be refused")


def scopes_of(groups: list[list[int]]) -> list[tuple[tuple[int, ...], int, int]]:
    """Constructs the scopes this rank is in, then votes in each."""
    mine = [Scope.over(ranks, timeout_s=LONG_S, name="s") for ranks in groups if dist.get_rank() in ranks]
    return [(scope.ranks, scope.index, scope.vote("step", facts=1 << scope.rank)) for scope in mine]


def test_a_scope_need_not_contain_rank_0(ranks: RankPool) -> None:
    seen = ranks.run(4, scopes_of, [[3, 1, 2]])
    assert seen == [[], *([((1, 2, 3), index, 0b1110)] for index in range(3))]


def test_disjoint_scopes_do_not_meet(ranks: RankPool) -> None:
    seen = ranks.run(4, scopes_of, [[0, 2], [1, 3]])
    assert [scopes[0][2] for scopes in seen] == [0b0101, 0b1010, 0b0101, 0b1010]


def test_overlapping_and_equal_scopes_of_one_name_are_kept_apart(ranks: RankPool) -> None:
    seen = ranks.run(3, scopes_of, [[0, 1], [0, 1, 2], [0, 1, 2], [0, 2]])
    assert [[facts for _, _, facts in scopes] for scopes in seen] == [[3, 7, 7, 5], [3, 7, 7], [7, 7, 5]]


def test_a_scope_of_one_rank_needs_nobody(ranks: RankPool) -> None:
    assert ranks.run(2, scopes_of, [[1]]) == [[], [((1,), 0, 2)]]


def differing_ranks() -> tuple[str, int]:
    said = refusal([0, 1] if dist.get_rank() == 0 else [0, 1, 2])
    return said, Scope.over(range(3), timeout_s=LONG_S, name="another").vote("step", facts=4)


def test_ranks_that_construct_different_scopes_are_named_at_once(ranks: RankPool) -> None:
    seen = ranks.run(3, differing_ranks, deadline_s=30.0)
    assert [facts for _, facts in seen] == [4, 4, 4]
    assert "ranks 0-1 cannot be made: rank 1 constructs scope 'optimizer' over ranks 0-2 there" in seen[0][0]
    for said, _ in seen[1:]:
        assert "ranks 0-2 cannot be made: rank 0 constructs scope 'optimizer' over ranks 0-1 there" in said


def differing_names() -> str:
    return refusal([0, 1], name=f"part {dist.get_rank()}")


def test_ranks_that_use_different_names_are_named_at_once(ranks: RankPool) -> None:
    first, second = ranks.run(2, differing_names, deadline_s=30.0)
    assert "rank 1 constructs scope 'part 1' over ranks 0-1 there" in first
    assert "rank 0 constructs scope 'part 0' over ranks 0-1 there" in second


def meet(name: str) -> None:
    """Lets the ranks go on together, so that only who is meant to be late is."""
    reached(name)
    wait_until_reached(name, count=dist.get_world_size())


def one_never_constructs() -> tuple[str, int]:
    meet("constructing")
    if dist.get_rank() == 1:
        wait_until_reached("refused", count=2)
    said = refusal(range(3), timeout_s=SHORT_S)
    meet("refused")
    return said, Scope.over(range(3), timeout_s=LONG_S, name="optimizer").vote("step", facts=4)


def test_a_rank_that_does_not_construct_is_named_and_may_try_again(ranks: RankPool) -> None:
    for said, facts in ranks.run(3, one_never_constructs):
        assert "rank 1 did not construct it within 2 s" in said
        assert "every rank that holds these parameters must construct it" in said
        assert facts == 4


def wrong_ranks() -> list[str]:
    me = dist.get_rank()
    return [refusal([1 - me]), refusal([me, 7]), refusal([])]


def test_ranks_that_cannot_be_are_refused(ranks: RankPool) -> None:
    for rank, (elsewhere, beyond, none) in enumerate(ranks.run(2, wrong_ranks)):
        assert f"constructed on rank {rank}, which is not one of its ranks" in elsewhere
        assert "has ranks that the world of 2 has not" in beyond
        assert "not one of its ranks" in none


def construct_while_others_vote() -> list[int]:
    """Rank 0 goes on to the next scope while rank 1 may still be on its way out of the last one."""
    facts = []
    for _ in range(20):
        scope = Scope.over([0, 1], timeout_s=LONG_S, name="s")
        facts += [scope.vote("a"), scope.vote("b", facts=1)]
    return facts


def test_scopes_made_one_after_another_do_not_accuse_each_other(ranks: RankPool) -> None:
    assert ranks.run(2, construct_while_others_vote) == [[0, 1] * 20] * 2


def connection(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def connections() -> tuple[bool, bool]:
    own, group = own_store("shardopt/test"), dist.group.WORLD.get_group_store()
    own.set("key", "value")
    return connection(own) is connection(group), group.check(["key"])


def test_a_scope_has_a_connection_and_a_prefix_of_its_own(ranks: RankPool) -> None:
    # A vote that waits on a shared connection would hold up every collective that needs the store.
    assert ranks.run(1, connections) == [(False, False)]


def payload(rank: int, num_bytes: int) -> bytes:
    """Random, so that chunks in another order are seen; only rank 1's size is asked for, so that sizes differ."""
    return random.Random(rank).randbytes((3, num_bytes, 0)[rank])


def exchange_digests(num_bytes: int) -> list[str]:
    scope = Scope.over(range(3), timeout_s=LONG_S, name="s")
    return [sha256(one).hexdigest() for one in scope.exchange("shapes", payload(scope.rank, num_bytes))]


# Around the chunks: empty, one byte, a chunk just full with the 8 bytes of its length, one byte more, and several.
@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES - 8, CHUNK_BYTES - 7, 2 * CHUNK_BYTES + 5])
def test_payloads_of_any_size_arrive_in_rank_order(ranks: RankPool, num_bytes: int) -> None:
    expected = [sha256(payload(rank, num_bytes)).hexdigest() for rank in range(3)]
    assert ranks.run(3, exchange_digests, num_bytes) == [expected] * 3


def exchange_without_one() -> tuple[tuple[int, ...], list[bytes], list[str]]:
    meet("constructing")
    scope = Scope.over(range(3), timeout_s=SHORT_S, name="s")
    meet("exchanging")
    if scope.rank == 1:
        wait_until_reached("given up", count=2)
    missing: tuple[int, ...] = ()
    try:
        scope.exchange("shapes", bytes(1000))
    except RankFailureError as error:
        missing = error.missing
    meet("given up")
    payloads = scope.exchange("names", bytes([scope.rank]))
    dist.barrier()
    return missing, payloads, [key for key in dist.group.WORLD.get_group_store().list_keys() if "/p/" in key]


def test_an_exchange_names_the_missing_and_takes_its_payloads_back(ranks: RankPool) -> None:
    for missing, payloads, left in ranks.run(3, exchange_without_one):
        assert missing == (1,)
        assert payloads == [b"\0", b"\1", b"\2"]
        assert left == []


def grid_ranks() -> dict[str, tuple[int, ...]]:
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    whole = distribute_tensor(torch.zeros(4, 4), grid, [Shard(0), Shard(1)])
    data = distribute_tensor(torch.zeros(4), grid["data"], [Shard(0)])
    expert = distribute_tensor(torch.zeros(4), grid["expert"], [Shard(0)])
    return {
        "plain": ranks_of([torch.zeros(1)]),
        "slice": ranks_of([data, torch.zeros(1)]),
        "slice in grid": ranks_of([data, whole]),
        "crossing": ranks_of([data, expert]),
    }


def test_ranks_of_parameters_on_a_grid(ranks: RankPool) -> None:
    seen = ranks.run(4, grid_ranks)
    column = [(0, 2), (1, 3), (0, 2), (1, 3)]
    for rank, found in enumerate(seen):
        everyone = (0, 1, 2, 3)
        assert found == {"plain": (), "slice": column[rank], "slice in grid": everyone, "crossing": everyone}


def sharded_without_group() -> str:
    mesh = dist.init_device_mesh("cpu", (1,))
    param = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    dist.destroy_process_group()
    try:
        ranks_of([param])
    except ScopeError as error:
        return str(error)
    raise AssertionError("ranks without a process group must be refused")


def test_sharded_parameters_need_a_process_group(ranks: RankPool) -> None:
    assert "call torch.distributed.init_process_group" in ranks.run(1, sharded_without_group)[0]
