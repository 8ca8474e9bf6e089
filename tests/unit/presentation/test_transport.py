"""Boxes of many tensors on their way between ranks: what arrives, how much at a time, and that ranks keep step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardopt.geometry import Box
from shardopt.presentation.ownership import Holdings
from shardopt.presentation.transport import MAX_EXCHANGE_BYTES, Move, Transport
from shardopt.scope.channel import Channel

# A deadline would be a wall-clock assertion.
EXAMPLES = settings(max_examples=100, deadline=None)
CPU = torch.device("cpu")
# Of 1, 2, 4, 8 and 16 bytes, and those that many operations do not know.
DTYPES = [
    torch.bool,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


@dataclass
class Post:
    """What the ranks have sent: [exchange][source] -> for each target its bytes.

    A run that only sends needs nothing of the others, so ranks can be run one after the other: each once to send, and
    when all have, each once more to receive.
    """

    sent: list[dict[int, list[Tensor]]] = field(default_factory=list)

    def put(self, exchange: int, source: int, parts: list[Tensor]) -> None:
        while len(self.sent) <= exchange:
            self.sent.append({})
        self.sent[exchange][source] = parts


@dataclass
class Mailbox:
    """One rank's channel.

    Attributes:
        post: of all ranks.
        size: number of ranks.
        index: of this one.
        delivers: whether the others have sent by now.
        sizes: of each exchange so far, in bytes: what was received of each rank, and what was sent to each.
    """

    post: Post
    size: int
    index: int
    delivers: bool = False
    sizes: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def exchange(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        """As ``all_to_all_single``, with what that asks of its arguments."""
        assert received.dtype == sent.dtype == torch.uint8
        assert (received.numel(), sent.numel()) == (sum(received_sizes), sum(sent_sizes))
        number = len(self.sizes)
        self.sizes.append((list(received_sizes), list(sent_sizes)))
        if not self.delivers:
            self.post.put(number, self.index, [part.clone() for part in sent.split(list(sent_sizes))])
            received.fill_(0xFF)
            return
        for source, into in enumerate(received.split(list(received_sizes))):
            into.copy_(self.post.sent[number][source][self.index])


@dataclass(frozen=True)
class Layout:
    """One tensor, and which rank holds what of it.

    Attributes:
        shape: of all of it.
        dtype: of its elements.
        boxes: by rank; ranks with equal boxes are replicas.
        targets: the ranks that get all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    targets: tuple[int, ...]

    def values(self, seed: int) -> Tensor:
        """All of it; any bits, as long as they are some of the dtype."""
        source = torch.Generator().manual_seed(seed)
        whole = torch.empty(self.shape, dtype=self.dtype)
        most = 2 if self.dtype == torch.bool else 256
        flat = torch.randint(most, (whole.numel() * whole.element_size(),), generator=source, dtype=torch.uint8)
        return whole.copy_(flat.view(self.dtype).view(self.shape))

    def moves(self, tensor: int) -> list[Move]:
        """Every box to every target that lacks it, from the first rank that has it."""
        holders: dict[Box, tuple[int, ...]] = {}
        for rank, box in enumerate(self.boxes):
            if box.volume:
                holders[box] = (*holders.get(box, ()), rank)
        holdings = Holdings(holders)
        size = torch.empty((), dtype=self.dtype).element_size()
        sources = [(box, holdings.sender(box, target), target) for target in self.targets for box in holders]
        return [Move(tensor, box, source, to, box.volume * size) for box, source, to in sources if source != to]


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int) -> Layout:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    whole = Box.whole(shape)
    targets = tuple(sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))))
    dtype = draw(st.sampled_from(DTYPES))
    # Cut along one dim, unevenly; some ranks get nothing, others what a rank has already.
    boxes = [whole]
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=num_ranks - 1)))
        boxes = [
            Box(
                (*whole.offset[:dim], start, *whole.offset[dim + 1 :]),
                (*shape[:dim], end - start, *shape[dim + 1 :]),
            )
            for start, end in zip([0, *cuts], [*cuts, shape[dim]], strict=True)
        ]
    extra = draw(st.lists(st.sampled_from(boxes), min_size=num_ranks - len(boxes), max_size=num_ranks - len(boxes)))
    return Layout(shape, dtype, tuple(draw(st.permutations([*boxes, *extra]))), targets)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[Layout], int]:
    num_ranks = draw(st.integers(1, 5))
    found = draw(st.lists(layouts(num_ranks), max_size=6))
    return num_ranks, found, draw(st.sampled_from([1, 64, 200, 500, MAX_EXCHANGE_BYTES]))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(box.offset, box.end, strict=True))


class Ranks:
    """Simulated ranks, each with its parts of the tensors and, where it is a target, room for all of it."""

    def __init__(self, num_ranks: int, layouts: Sequence[Layout], max_bytes: int) -> None:
        self.wanted = [layout.values(index) for index, layout in enumerate(layouts)]
        self.got = [[torch.zeros(one.shape, dtype=one.dtype) for one in layouts] for _ in range(num_ranks)]
        self.moves = [layout.moves(index) for index, layout in enumerate(layouts)]
        post = Post()
        self.mailboxes = [Mailbox(post, num_ranks, rank) for rank in range(num_ranks)]
        self.transports = [Transport(self.moves, cast(Channel, box), max_bytes) for box in self.mailboxes]
        for rank, mine in enumerate(self.got):
            for layout, wanted, whole in zip(layouts, self.wanted, mine, strict=True):
                here = slices(layout.boxes[rank])
                whole[here] = wanted[here]

    def run(self) -> None:
        for delivers in (False, True):
            for rank, (mailbox, transport) in enumerate(zip(self.mailboxes, self.transports, strict=True)):
                mailbox.delivers = delivers
                mailbox.sizes.clear()
                write = partial(self._room, rank) if delivers else self._nowhere
                transport.run(partial(self._own, rank), write, CPU)

    def _own(self, rank: int, move: Move) -> Tensor:
        assert move.source == rank
        return self.wanted[move.tensor][slices(move.box)]

    def _room(self, rank: int, move: Move) -> Tensor:
        assert move.target == rank
        return self.got[rank][move.tensor][slices(move.box)]

    def _nowhere(self, move: Move) -> Tensor:
        return torch.empty(move.box.size, dtype=self.wanted[move.tensor].dtype)


def bits(tensor: Tensor) -> list[int]:
    # NaNs of all kinds are among the values, and 0-d tensors have no bytes to view.
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@EXAMPLES
@given(cases())
def test_what_arrives_is_what_was_sent(case: tuple[int, list[Layout], int]) -> None:
    num_ranks, found, max_bytes = case
    ranks = Ranks(num_ranks, found, max_bytes)
    ranks.run()
    for index, layout in enumerate(found):
        for target in layout.targets:
            assert bits(ranks.got[target][index]) == bits(ranks.wanted[index])


@EXAMPLES
@given(cases())
def test_ranks_take_the_same_exchanges_of_sizes_that_match(case: tuple[int, list[Layout], int]) -> None:
    num_ranks, found, max_bytes = case
    ranks = Ranks(num_ranks, found, max_bytes)
    ranks.run()
    (number,) = {len(mailbox.sizes) for mailbox in ranks.mailboxes}
    for exchange in range(number):
        for one in ranks.mailboxes:
            for other in ranks.mailboxes:
                _, sent = one.sizes[exchange]
                received, _ = other.sizes[exchange]
                assert sent[other.index] == received[one.index]
            assert one.sizes[exchange][1][one.index] == 0


@EXAMPLES
@given(cases())
def test_an_exchange_is_bounded_unless_one_tensor_has_more(case: tuple[int, list[Layout], int]) -> None:
    num_ranks, found, max_bytes = case
    ranks = Ranks(num_ranks, found, max_bytes)
    ranks.run()
    for mailbox, transport in zip(ranks.mailboxes, ranks.transports, strict=True):
        largest = max((carried(moves, mailbox.index) for moves in ranks.moves), default=0)
        totals = [sum(received) + sum(sent) for received, sent in mailbox.sizes]
        assert transport.num_buffer_bytes == max(totals, default=0) <= max(max_bytes, largest)


def carried(moves: Sequence[Move], rank: int) -> int:
    """Bytes of one tensor that a rank sends and receives, each piece rounded up to where the next can begin."""
    return sum(move.room for move in moves if rank in (move.source, move.target))


def matrix(rows: int, dtype: torch.dtype = torch.float32) -> Layout:
    """A matrix of 16 bytes a row, its rows on two ranks, wanted whole on the first."""
    top = rows // 2
    boxes = (Box((0, 0), (top, 4)), Box((top, 0), (rows - top, 4)))
    return Layout((rows, 4), dtype, boxes, targets=(0,))


@pytest.mark.parametrize(
    ("rows", "max_bytes", "exchanges"),
    [
        # Half of each arrives: 16, 32 and 48 bytes.
        ((2, 4, 6), 1000, [96]),
        ((2, 4, 6), 96, [96]),
        ((2, 4, 6), 95, [48, 48]),
        ((2, 4, 6), 47, [16, 32, 48]),
        # One that has more than an exchange may is alone in its own, and ends the one before.
        ((2, 40, 2, 2), 64, [16, 320, 32]),
    ],
)
def test_tensors_share_exchanges_up_to_the_bound(rows: tuple[int, ...], max_bytes: int, exchanges: list[int]) -> None:
    ranks = Ranks(2, [matrix(count) for count in rows], max_bytes)
    ranks.run()
    for mailbox in ranks.mailboxes:
        assert [sum(received) + sum(sent) for received, sent in mailbox.sizes] == exchanges


def test_two_tensors_that_meet_on_no_rank_share_an_exchange() -> None:
    one = matrix(4)
    nothing = Box((0, 0), (0, 4))
    other = Layout(one.shape, one.dtype, (nothing, nothing, *one.boxes), targets=(2,))
    first = Layout(one.shape, one.dtype, (*one.boxes, nothing, nothing), targets=(0,))
    assert [len(box.sizes) for box in ran(Ranks(4, [first, other], max_bytes=32))] == [1] * 4
    assert [len(box.sizes) for box in ran(Ranks(4, [first, first], max_bytes=32))] == [2] * 4


def test_what_a_rank_gets_of_several_others_counts_together() -> None:
    """Of two tensors each sender has one; the rank that gets both must have room for both."""
    one = Box((0, 0), (4, 4))
    nothing = Box((0, 0), (0, 4))
    first = Layout((4, 4), torch.float32, (one, nothing, nothing), targets=(2,))
    second = Layout((4, 4), torch.float32, (nothing, one, nothing), targets=(2,))
    assert [len(box.sizes) for box in ran(Ranks(3, [first, second], max_bytes=128))] == [1] * 3
    assert [len(box.sizes) for box in ran(Ranks(3, [first, second], max_bytes=127))] == [2] * 3


def ran(ranks: Ranks) -> list[Mailbox]:
    ranks.run()
    return ranks.mailboxes


def test_a_transport_can_be_used_again_with_other_values() -> None:
    ranks = Ranks(2, [matrix(4), matrix(3, torch.bool)], MAX_EXCHANGE_BYTES)
    for seed in (7, 8):
        ranks.wanted = [matrix(4).values(seed), matrix(3, torch.bool).values(seed)]
        ranks.run()
        for got, wanted in zip(ranks.got[0], ranks.wanted, strict=True):
            box = slices(Box((len(wanted) // 2, 0), (len(wanted) - len(wanted) // 2, 4)))
            assert bits(got[box]) == bits(wanted[box])


def test_without_moves_nothing_is_exchanged() -> None:
    assert [box.sizes for box in ran(Ranks(3, [], MAX_EXCHANGE_BYTES))] == [[], [], []]


def test_parts_are_read_and_written_where_memory_is_not_in_order() -> None:
    """A box along the last dim is no contiguous memory, on either side."""
    boxes = (Box((0, 0), (3, 2)), Box((0, 2), (3, 3)))
    ranks = Ranks(2, [Layout((3, 5), torch.bfloat16, boxes, targets=(1,))], MAX_EXCHANGE_BYTES)
    ranks.run()
    assert not ranks.wanted[0][slices(boxes[0])].is_contiguous()
    assert bits(ranks.got[1][0]) == bits(ranks.wanted[0])
