"""The engine for parameters on a device: chunks of state stream through a ring, and a launch steps each there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PresentationError, ShardoptError
from shardopt.swap.backend import Backend, Launch, Stream
from shardopt.swap.device_rows import ALIGNED_BYTES, ALIGNED_ELEMENTS, BLOCK, Kind
from shardopt.swap.device_state import DeviceState
from shardopt.swap.engine import Engine, State, Step
from shardopt.swap.gradients import Found
from shardopt.swap.held import Held, Keeps, without_memory
from shardopt.swap.kernel_rows import DtypeCode, MasterKind, Table
from shardopt.swap.launches import DeviceKernel, ScaledLaunch, Stretch
from shardopt.swap.numbers import Groups
from shardopt.swap.ring import Entries, Ring
from shardopt.swap.step_tables import table_room
from shardopt.torch_compat import capturing_graph, local_shard

__all__ = ["DeviceEngine"]


class DeviceEngine(Engine):
    """Steps parameters on a device, with state on the host; see ``Ring``. It has not run on a GPU.

    A GradScaler's scale and verdict stay on the device: whether it has skipped a step is looked up when the next one
    begins, or when the state is read.

    Args:
        keeps: what is kept for each parameter.
        device: of the parameters.
        backend: its streams and memory.
        kernel: steps rows there.
        pin: whether slabs are registered with CUDA.
        seed: of random bits.
        chunk_bytes: of state that is copied at a time, at most.
        budget_bytes: of device memory for state that stays there, besides the ring's own.
    """

    # What is made in inference mode no copy could write to.
    @torch.inference_mode(False)
    def __init__(
        self,
        keeps: Keeps,
        *,
        device: torch.device,
        backend: Backend,
        kernel: DeviceKernel,
        pin: bool,
        seed: int,
        chunk_bytes: int,
        budget_bytes: int,
    ) -> None:
        self.backend = backend
        self._kernel = kernel
        self._chunk_bytes, self._budget_bytes = chunk_bytes, budget_bytes
        self._state = DeviceState()
        self._ring: Ring | None = None
        self._verdict = backend.allocate_host(4).view(torch.float32)
        self._settled = backend.event()
        # Parameters of a step that a GradScaler's verdict may have skipped, which the host does not know yet.
        # And whether masters were loaded since the step before.
        self._unsettled: tuple[NDArray[np.bool_], bool] | None = None
        super().__init__(keeps, device=device, pin=pin, seed=seed, num_threads=None)

    @property
    def device_bytes(self) -> int:
        """Device memory that it has asked for."""
        return 0 if self._ring is None else self._ring.device_bytes

    def hold(self, named: Sequence[tuple[str, Tensor]], amsgrad: Sequence[bool]) -> list[Held]:
        """Makes state, and the ring anew."""
        new = without_memory(named, self.keeps, first_stream=self.num_streams)
        grown = self._state.grown(new, amsgrad, self.keeps, self.slabs, chunk_bytes=self._chunk_bytes)
        self.drain()
        # Its device memory goes first: there may not be room for both.
        self._ring = None
        problem: BaseException | None = None
        try:
            self._ring = self._make_ring(grown)
        except BaseException as error:
            # Its frames hold what was made of the new one.
            problem = error.with_traceback(None)
        if problem is not None:
            self._ring = self._make_ring(self._state)
            raise problem
        self._state = grown
        return new

    def withdraw(self, params: Sequence[Tensor]) -> None:
        """Forgets parameters that were added last, and makes the ring anew without them."""
        super().withdraw(params)
        gone = {id(param) for param in params}
        kept = sum(id(one.param) not in gone for one in self._state.members)
        if kept < len(self._state.members):
            self._state = self._state.cut(kept)
            self._ring = None
            self._ring = self._make_ring(self._state)

    def look(self, groups: Groups, state: State) -> Found:
        """Checks the step that follows.

        Raises:
            PresentationError: a CUDA graph is being captured, which would capture this step's addresses and counts.
        """
        if capturing_graph():
            raise PresentationError(
                "SwapAdamW cannot step within a CUDA graph: each step has addresses and counts of its own. Capture the "
                "forward and backward passes alone."
            )
        return super().look(groups, state)

    def _make_ring(self, state: DeviceState) -> Ring:
        room = table_room([*self._kernel.room(len(state.rows), len(state.members)), *(16, 8)])
        return Ring(self.backend, state.chunks, table_bytes=room, budget_bytes=self._budget_bytes)

    def index(self, groups: Groups) -> None:
        """Takes the parameters in the order of the groups, and makes the tables anew."""
        self.settle_counts()
        super().index(groups)
        places = {id(one): place for place, one in enumerate(self.held)}
        # Parameters that are in no group any more are not stepped.
        which = np.array([places.get(id(one), -1) for one in self._state.members], np.int64)
        self._owner: NDArray[np.int64] = which[self._state.rows["param"]]
        self._rows: Table = self._state.table()

    def drain(self) -> None:
        """Waits until the host has all state, and knows how many steps were made.

        What stays on the device is copied there again in the next step: the host may have written to it.
        """
        self.settle_counts()
        if self._ring is not None:
            self._ring.drain()
            self._ring.host_changed()

    def skips(self, amp: Mapping[str, Tensor]) -> bool:
        """Never: what is on the device is not waited for."""
        return False

    def settle_counts(self) -> None:
        """Takes back the counts of a step that was skipped."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None:
            return
        if not self.backend.query(self._settled):
            self.backend.synchronize(self._settled)
        self.backend.host_reads(self._verdict)
        if self._verdict.item() != 0:
            has, was_loaded = unsettled
            self.table.count(has, -1)
            if was_loaded:
                # As if the step had not been: weights may still come from the masters' checkpoint.
                self.masters.note_loaded()

    def run(self, step: Step) -> None:
        """Steps all chunks of which a parameter has a gradient."""
        if self._ring is None:
            raise AssertionError("parameters with gradients have a ring")
        chosen, stretches = self._stretches(step)
        tables = self._kernel.tables(
            self._rows[chosen],
            self._state.rows["offset"][chosen],
            [one for listed in stretches.values() for one in listed],
            step.hypers,
            self.seed,
        )
        # A scaler's numbers are where the loss is, which may be another device: in its order, too.
        amp = {key: _plain(value).to(self.device, non_blocking=True) for key, value in step.amp.items()}
        is_first = True

        def make_launch(chunk: int, entries: Entries, there: Sequence[Tensor]) -> Launch:
            nonlocal is_first
            *own, factor, scalars = there
            launch = self._kernel.launch(f"chunk {chunk}", stretches[chunk], own, scalars, entries)
            launch = ScaledLaunch(launch, amp, factor, scalars) if amp and is_first else launch
            is_first = False
            return launch

        # In double until the scale is in it, as on the host.
        factor = np.array([step.factor, 0.0])
        with np.errstate(over="ignore"):
            scalars = np.array([step.factor, 0.0], np.float32)
        try:
            self._ring.step(list(stretches), [*tables, factor, scalars], make_launch)
        except (ValueError, TypeError) as error:
            if is_first:
                raise
            # Of these the engine takes it that nothing was written.
            raise ShardoptError(f"a step on {self.device} has failed half way: {error}") from error
        if "found_inf" in amp:
            self.backend.copy(self._verdict, amp["found_inf"].detach().reshape(1), Stream.COMPUTE)
            self.backend.record(self._settled, Stream.COMPUTE)
            self._unsettled = step.has, self.masters.loaded

    def _stretches(self, step: Step) -> tuple[NDArray[np.int64], dict[int, list[Stretch]]]:
        """The rows that are stepped, in their order, and what each chunk does with which of them."""
        rows, chosen = self._rows, np.flatnonzero((self._owner >= 0) & step.has[self._owner])
        # Rows of one chunk that a kernel cannot step together: gradients of two dtypes, maxima of some groups.
        key = self._state.chunk_of * 4 + step.code[self._owner] * 2 + step.amsgrad[self._owner]
        if (np.diff(key[chosen]) < 0).any():
            chosen = chosen[np.argsort(key[chosen], kind="stable")]
        if not len(chosen):
            return chosen, {}
        owner, key = self._owner[chosen], key[chosen]
        codes = step.code[owner]
        width = np.where(codes == DtypeCode.BF16, 2, 4)
        rows["grad"][chosen] = step.address[owner] + self._state.rows["dense_offset"][chosen] * width
        rows["grad_dtype"][chosen], rows["hyper"][chosen] = codes, step.which[owner]
        places = rows["param"][chosen] | rows["grad"][chosen]
        odd = (places % ALIGNED_BYTES != 0) | (self._state.rows["offset"][chosen] % ALIGNED_ELEMENTS != 0)
        blocks = np.cumsum(-(-rows["numel"][chosen] // BLOCK))
        starts = np.flatnonzero(np.diff(key, prepend=-1))
        found: dict[int, list[Stretch]] = {}
        for first, end in zip(starts.tolist(), [*starts.tolist()[1:], len(chosen)], strict=True):
            members = [int(index) for index in dict.fromkeys(owner[first:end])]
            stretch = Stretch(
                _kind(rows[chosen[first]], amsgrad=bool(key[first] & 1), aligned=not odd[first:end].any()),
                first,
                end,
                int(blocks[first - 1]) if first else 0,
                int(blocks[end - 1]),
                [self.held[index].shard for index in members],
                [grad for index in members if (grad := step.found.parts[index]) is not None],
            )
            found.setdefault(int(key[first]) // 4, []).append(stretch)
        return chosen, found


def _kind(row: np.void, *, amsgrad: bool, aligned: bool) -> Kind:
    return Kind(
        param_dtype=DtypeCode(row["param_dtype"]),
        grad_dtype=DtypeCode(row["grad_dtype"]),
        moment_dtype=DtypeCode(row["moment_dtype"]),
        master_kind=MasterKind(row["master_kind"]),
        amsgrad=amsgrad,
        aligned=aligned,
    )


def _plain(value: Tensor) -> Tensor:
    """This rank's copy of a number that all have."""
    return local_shard(value) if isinstance(value, DTensor) else value
