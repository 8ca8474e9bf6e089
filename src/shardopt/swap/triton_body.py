"""The AdamW step of one chunk on a GPU, in Triton: the arithmetic of csrc/step_body.h and csrc/words_body.h.

Same bits as the host kernel: each fused multiply-add is spelled out and launches forbid others, square roots and
divisions are correctly rounded, and bf16 is an integer until it has been widened. A NaN is NaN in both, its payload is
not promised. It has run in Triton's interpreter, and been compiled for GPUs, but never run on one.

Nothing of shardopt imports this module; shardopt.swap.triton_kernel loads it when there is a GPU to step, because
triton is optional and takes long to import.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardopt.swap.device_rows import ALIGNED_BYTES, ALIGNED_ELEMENTS, DEVICE_HYPER, ROW_FIELDS
from shardopt.swap.kernel_rows import MasterKind

__all__ = ["adamw_chunk"]

# A compiled function sees only those globals that are tl.constexpr.
_ROW_FIELDS = tl.constexpr(len(ROW_FIELDS))
_PARAM = tl.constexpr(ROW_FIELDS.index("param"))
_GRAD = tl.constexpr(ROW_FIELDS.index("grad"))
_OUT = tl.constexpr(ROW_FIELDS.index("out"))
_OFFSET = tl.constexpr(ROW_FIELDS.index("offset"))
_NUMEL = tl.constexpr(ROW_FIELDS.index("numel"))
_INDEX_START = tl.constexpr(ROW_FIELDS.index("index_start"))
_INDEX_RUN = tl.constexpr(ROW_FIELDS.index("index_run"))
_INDEX_STRIDE = tl.constexpr(ROW_FIELDS.index("index_stride"))
_KEY = tl.constexpr(ROW_FIELDS.index("key"))
_UPPER = tl.constexpr(ROW_FIELDS.index("upper"))
_HYPER = tl.constexpr(ROW_FIELDS.index("hyper"))
_HYPER_FIELDS = tl.constexpr(len(DEVICE_HYPER))
_DECAY = tl.constexpr(DEVICE_HYPER.index("decay"))
_GRAD_WEIGHT = tl.constexpr(DEVICE_HYPER.index("grad_weight"))
_BETA2 = tl.constexpr(DEVICE_HYPER.index("beta2"))
_SQUARE_WEIGHT = tl.constexpr(DEVICE_HYPER.index("square_weight"))
_STEP_SIZE = tl.constexpr(DEVICE_HYPER.index("step_size"))
_BIAS_CORRECTION = tl.constexpr(DEVICE_HYPER.index("bias_correction"))
_EPS = tl.constexpr(DEVICE_HYPER.index("eps"))
_GRAD_SIGN = tl.constexpr(DEVICE_HYPER.index("grad_sign"))
_ALIGNED_BYTES = tl.constexpr(ALIGNED_BYTES)
_ALIGNED_ELEMENTS = tl.constexpr(ALIGNED_ELEMENTS)
_FP32_MASTER = tl.constexpr(int(MasterKind.FP32))
_REMAINDER16 = tl.constexpr(int(MasterKind.REMAINDER16))


@triton.jit
def _at(address: tl.tensor, first: tl.tensor, BF16: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """A pointer to element ``first`` of what is at an address."""
    element = tl.int16 if BF16 else tl.float32
    pointer = address.to(tl.pointer_type(element)) + first
    if ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNED_BYTES)
    return pointer


@triton.jit
def _in_slot(entry: tl.tensor, offset: tl.tensor, BF16: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """A pointer to element ``offset`` of a tensor of the slot."""
    if BF16:
        entry = entry.to(tl.pointer_type(tl.int16), bitcast=True)
    pointer = entry + offset
    if ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNED_BYTES)
    return pointer


@triton.jit
def _load(pointers: tl.tensor, mask: tl.tensor, BF16: tl.constexpr) -> tl.tensor:
    """The values in float32."""
    values = tl.load(pointers, mask=mask)
    if BF16:
        values = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _keep_nan(bits: tl.tensor, rounded: tl.tensor) -> tl.tensor:
    """``rounded``, the upper halves of ``bits``, but NaN where these are: rounding may carry out of a NaN."""
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)


@triton.jit
def _store_nearest(pointers: tl.tensor, values: tl.tensor, mask: tl.tensor, BF16: tl.constexpr) -> None:
    """The values, to nearest even where they are stored as bf16."""
    if BF16:
        bits = values.to(tl.uint32, bitcast=True)
        tl.store(pointers, _keep_nan(bits, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _store_stochastic(pointers: tl.tensor, values: tl.tensor, random16: tl.tensor, mask: tl.tensor) -> None:
    """The values as bf16, up with the probability that keeps the mean; exact values stay."""
    bits = values.to(tl.uint32, bitcast=True)
    tl.store(pointers, _keep_nan(bits, (bits + random16) >> 16).to(tl.int16), mask=mask)


@triton.jit
def _load_param(
    params: tl.tensor, masters: tl.tensor | None, mask: tl.tensor, PARAM_BF16: tl.constexpr, MASTER: tl.constexpr
) -> tl.tensor:
    """The parameters in float32, exactly."""
    if MASTER == _FP32_MASTER:
        return _load(masters, mask, False)
    if MASTER == _REMAINDER16:
        upper = tl.load(params, mask=mask).to(tl.int32) << 16
        return (upper + tl.load(masters, mask=mask).to(tl.int32)).to(tl.float32, bitcast=True)
    return _load(params, mask, PARAM_BF16)


@triton.jit
def _store_param(
    params: tl.tensor,
    masters: tl.tensor | None,
    values: tl.tensor,
    mask: tl.tensor,
    PARAM_BF16: tl.constexpr,
    MASTER: tl.constexpr,
) -> None:
    """The parameters, and what stands behind them."""
    if MASTER == _REMAINDER16:
        # The upper half, ties away from zero, and the lower one, which is what is missing; of NaNs one that stays NaN.
        bits = values.to(tl.uint32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
        tl.store(params, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
        tl.store(masters, bits.to(tl.int16), mask=mask)
    else:
        if MASTER == _FP32_MASTER:
            tl.store(masters, values, mask=mask)
        _store_nearest(params, values, mask, PARAM_BF16)


@triton.jit
def _indices(row: tl.tensor, first: tl.tensor, i: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    """Where elements ``first + i`` of the row are in the unsharded tensor; see ``index_run`` of kernel_rows.ROW.

    Two divisions of 64 bits for all of them; the runs that end within the span are counted in 32 bits.
    """
    run = tl.load(row + _INDEX_RUN)
    stride = tl.load(row + _INDEX_STRIDE)
    before = first // run
    inside = first - before * run
    short = tl.minimum(run, SPAN).to(tl.int32)  # a longer run ends once at most
    left = tl.minimum(run - inside, SPAN).to(tl.int32)
    ended = ((i + (short - left)).to(tl.uint32) // short.to(tl.uint32)).to(tl.int64)
    return tl.load(row + _INDEX_START) + before * stride + inside + i + ended * (stride - run)


@triton.jit
def _words(row: tl.tensor, index: tl.tensor) -> tl.tensor:
    """A random word for each global index: word (e / 16) % 4 of counter e / 64 * 16 + e % 16, by Philox-4x32-10."""
    key = tl.load(row + _KEY)
    upper = tl.load(row + _UPPER)
    key0 = key.to(tl.uint32)
    key1 = (key >> 32).to(tl.uint32)
    counter = (index >> 6) * 16 + (index & 15)
    a = counter.to(tl.uint32)
    b = (counter >> 32).to(tl.uint32)
    c = tl.zeros_like(a) + upper.to(tl.uint32)
    d = tl.zeros_like(a) + (upper >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high_a = tl.umulhi(a, 0xD2511F53)
        low_a = a * 0xD2511F53
        high_c = tl.umulhi(c, 0xCD9E8D57)
        low_c = c * 0xCD9E8D57
        a = high_c ^ b ^ key0
        b = low_c
        c = high_a ^ d ^ key1
        d = low_a
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    which = (index >> 4) & 3
    return tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))


@triton.jit
def _moments(
    hyper: tl.tensor, scalars: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Both moments after this gradient, in the order of operations of torch.optim.AdamW on CPU tensors."""
    grad = grad * (tl.load(hyper + _GRAD_SIGN) * tl.load(scalars))
    weight = tl.load(hyper + _GRAD_WEIGHT)
    # torch.lerp walks from the nearer end: from exp_avg for weights below a half, else back from grad.
    from_grad = weight >= 0.5
    coefficient = tl.where(from_grad, weight - 1.0, weight)
    exp_avg = tl.fma(coefficient, grad - exp_avg, tl.where(from_grad, grad, exp_avg))
    kept = exp_avg_sq * tl.load(hyper + _BETA2)
    return exp_avg, tl.fma(tl.load(hyper + _SQUARE_WEIGHT) * grad, grad, kept)


@triton.jit
def _moved(hyper: tl.tensor, param: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor) -> tl.tensor:
    """The parameter after its step: weight decay and update together, as one small change."""
    root = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(hyper + _BIAS_CORRECTION)) + tl.load(hyper + _EPS)
    update = tl.div_rn(tl.load(hyper + _STEP_SIZE) * exp_avg, root)
    # An infinite parameter stays what it is, as in torch: its decay would make it NaN.
    decayed = tl.where(param - param == 0.0, param, 0.0)
    return param - tl.fma(tl.load(hyper + _DECAY), decayed, update)


@triton.jit
def _step(
    row: tl.tensor,
    hypers: tl.tensor,
    scalars: tl.tensor,
    slot: tl.tuple,
    first: tl.tensor,
    limit: tl.tensor,
    PARAM_BF16: tl.constexpr,
    GRAD_BF16: tl.constexpr,
    MOMENT_BF16: tl.constexpr,
    MASTER: tl.constexpr,
    AMSGRAD: tl.constexpr,
    HAS_OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Steps elements ``first`` to ``first + limit`` of a row, at most ``SPAN`` of them."""
    exp_avg, exp_avg_sq, max_exp_avg_sq, master = slot
    i = tl.arange(0, SPAN)
    limit = tl.minimum(limit, SPAN).to(tl.int32)
    mask = i < limit
    offset = tl.load(row + _OFFSET) + first
    hyper = hypers + tl.load(row + _HYPER) * _HYPER_FIELDS
    params = _at(tl.load(row + _PARAM), first, PARAM_BF16, ALIGNED) + i
    grads = _at(tl.load(row + _GRAD), first, GRAD_BF16, ALIGNED) + i
    firsts = _in_slot(exp_avg, offset, MOMENT_BF16, ALIGNED) + i
    seconds = _in_slot(exp_avg_sq, offset, MOMENT_BF16, ALIGNED) + i
    masters = _in_slot(master, offset, MASTER == _REMAINDER16, ALIGNED) + i if MASTER != 0 else None

    # All loads come before the first store, so that they wait together.
    grad = _load(grads, mask, GRAD_BF16)
    old_first = _load(firsts, mask, MOMENT_BF16)
    old_second = _load(seconds, mask, MOMENT_BF16)
    if AMSGRAD:
        maxima = _in_slot(max_exp_avg_sq, offset, MOMENT_BF16, ALIGNED) + i
        old_max = _load(maxima, mask, MOMENT_BF16)
    param = _load_param(params, masters, mask, PARAM_BF16, MASTER)

    new_first, new_second = _moments(hyper, scalars, grad, old_first, old_second)
    if MOMENT_BF16:
        words = _words(row, _indices(row, first, i, SPAN))
        _store_stochastic(firsts, new_first, words & 0xFFFF, mask)
        _store_stochastic(seconds, new_second, words >> 16, mask)
    else:
        tl.store(firsts, new_first, mask=mask)
        tl.store(seconds, new_second, mask=mask)
    if AMSGRAD:
        # The larger of the two; NaN if one of them is.
        new_second = tl.where((new_second > old_max) | (new_second != new_second), new_second, old_max)
        # To nearest: a maximum of values that chance has raised would drift up.
        _store_nearest(maxima, new_second, mask, MOMENT_BF16)
    param = _moved(hyper, param, new_first, new_second)
    _store_param(params, masters, param, mask, PARAM_BF16, MASTER)
    if HAS_OUT:
        _store_nearest(_at(tl.load(row + _OUT), first, True, ALIGNED) + i, param, mask, True)


@triton.jit
def _place(
    rows: tl.tensor, blocks: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The row that this program steps a block of, the block's first element there, and how many the row has."""
    # Counted as the rows of the whole step are.
    program = tl.program_id(0) + tl.load(blocks)
    # The last row that begins with it or before it.
    low = num_rows * 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(blocks + middle * 2) <= program
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    block = blocks + low * 2
    first = (program - tl.load(block) + tl.load(block + 1)).to(tl.int64) * BLOCK
    row = rows + low.to(tl.int64) * _ROW_FIELDS
    return row, first, tl.load(row + _NUMEL)


# Whether addresses are aligned is for the rows' kind to say: a pointer's own alignment must not make another variant.
_POINTERS = ("rows", "blocks", "hypers", "scalars", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=_POINTERS)
def adamw_chunk(
    rows: tl.tensor,
    blocks: tl.tensor,
    hypers: tl.tensor,
    scalars: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor | None,
    master: tl.tensor | None,
    num_rows: tl.tensor,
    PARAM_BF16: tl.constexpr,
    GRAD_BF16: tl.constexpr,
    MOMENT_BF16: tl.constexpr,
    MASTER: tl.constexpr,
    AMSGRAD: tl.constexpr,
    HAS_OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program steps one block of a row; the arguments are those of ``launch_adamw``."""
    if tl.load(scalars + 1) != 0.0:
        return
    row, first, numel = _place(rows, blocks, num_rows, BLOCK)
    # Elements that fill accesses of 128 bits; the few that a row has left over are stepped by themselves.
    whole = numel // _ALIGNED_ELEMENTS * _ALIGNED_ELEMENTS if ALIGNED else numel
    _step(
        row,
        hypers,
        scalars,
        (exp_avg, exp_avg_sq, max_exp_avg_sq, master),
        first,
        whole - first,
        PARAM_BF16,
        GRAD_BF16,
        MOMENT_BF16,
        MASTER,
        AMSGRAD,
        HAS_OUT,
        ALIGNED,
        BLOCK,
    )
    if ALIGNED and (whole < numel) & (whole - first < BLOCK):
        _step(
            row,
            hypers,
            scalars,
            (exp_avg, exp_avg_sq, max_exp_avg_sq, master),
            whole,
            numel - whole,
            PARAM_BF16,
            GRAD_BF16,
            MOMENT_BF16,
            MASTER,
            AMSGRAD,
            HAS_OUT,
            False,
            _ALIGNED_ELEMENTS,
        )
