"""GEMMs for NVIDIA's Hopper that do the next step too, in Gluon: activation(gate) * up, and out += x @ weight.T.

Twelve warps: one loads tiles of x and of the weight, two groups of four each multiply half of a tile's rows. Programs
are persistent, and the loading warp runs ahead into the next tile. A group rounds its sums, starts the next tile, and
activates or adds while the matrix units work on that (`hopper_epilogues.py`).

The weight's part of a tile is two halves. With an activation these are the same columns of gate and up, so a thread has
both and writes their product: gate and up themselves never leave the multiprocessor. In FP8 x and the weight are codes,
and sums are multiplied by the scales of their channel and of their row, then rounded to bfloat16. With an activation
`out` are codes, too, each part of a row with a scale of its own, as no program has all columns of a row; nearly always
it is 1, and `rescale` in `fp8_kernels.py` sees to the rest.

The residual never comes to the multiprocessor: the GPU's cache adds (a TMA reduction). It rounds once, exactly, which
is what a float32 sum rounded again gives too: a float32 has more than 2 p + 2 bits, for p bits of bfloat16 or float16.
Where the last tiles are for at most half of the multiprocessors, two programs take the halves of each, if they add.

A row's bits depend neither on its place nor on the number of rows: an element is summed over k in order, 16 at a time,
in FP8 32, by one accumulator, and is then rounded as `gate_kernel`, or a GEMM and `add_norm_kernel`, round it.

In the kernel: `R` rows of a group, `C` columns of half a tile, `S` columns of x in a step, `P` columns of `out` in a
part, four of which are a tile's and two those of half a tile.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from prefixwise.backends.torch.cuda.attention import HOPPER
from prefixwise.backends.torch.cuda.hopper import describe
from prefixwise.backends.torch.cuda.hopper_epilogues import jit, load_scales, round_sums, store_part
from prefixwise.backends.torch.fp8 import FP8
from prefixwise.forward.fp8 import ACTIVATION_PART
from prefixwise.models.config import Activation

_NUM_BUFFERS: gl.constexpr = gl.constexpr(4)  # steps in flight
_NUM_PARTS: gl.constexpr = gl.constexpr(4)
_BAND_TILES: gl.constexpr = gl.constexpr(16)  # rows of tiles that share the weight's columns before the next ones' turn
_GROUP_ROWS = 64  # R
_TILE_ROWS = 2 * _GROUP_ROWS
_HALF_COLUMNS = 128  # C
_STEP_BYTES = 128  # of S columns
_MIN_STEPS = 8  # of a tile: more than a group has something else to do in
OPTIONS = {"num_warps": 4, "maxnreg": 65536 // 384 // 8 * 8}  # all registers for the 384 threads

MIN_ROWS = 2048  # fewer do not make tiles for all multiprocessors: cuBLAS, which has smaller ones, is faster
_MIN_ADDED_ROWS = 6144  # the same of rows to which the GEMM adds
_MIN_FILL = 0.88  # of the multiprocessors' turns with a tile to which the GEMM adds
_HALF_TURN = 0.6  # of a turn: half a tile takes longer than half the time


@jit
def _place_of(tile: gl.tensor, num_row_tiles: gl.tensor, num_column_tiles: gl.tensor) -> gl.tuple:
    """Row and column of a tile, in tiles. Tiles go down the columns of a band, then to the next band: programs that run
    at the same time share rows and columns, so these come from the GPU's cache."""
    band, in_band = tile // (_BAND_TILES * num_column_tiles), tile % (_BAND_TILES * num_column_tiles)
    first = band * _BAND_TILES
    height = gl.minimum(num_row_tiles - first, _BAND_TILES)
    return first + in_band % height, in_band // height


@jit
def _load_tile(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    buffers: gl.tuple,  # of x [2 * num_buffers, R, S], one for each group, and of the weight [num_buffers, 2 C, S]
    barriers: gl.tuple,  # of each buffer, [num_buffers, 1] each: it is loaded, is consumed
    row: gl.tensor,
    columns: gl.tuple,  # where the halves of the tile begin, or the one
    step: gl.tensor,
    num_steps: gl.tensor,
) -> None:
    """Load every step of a tile, in order; `step` is the number of the first."""
    x_buffers, weight_buffers = buffers
    ready, free = barriers
    num_rows: gl.constexpr = x_buffers.shape[1]
    step_size: gl.constexpr = x_buffers.shape[2]
    half: gl.constexpr = weight.block_type.shape[0]
    for number in range(num_steps):
        buffer, is_odd = (step + number) % _NUM_BUFFERS, ((step + number) // _NUM_BUFFERS) % 2
        at = number * step_size
        mbarrier.wait(free.index(buffer), is_odd ^ 1)
        loaded, halves = ready.index(buffer), weight_buffers.index(buffer)
        mbarrier.expect(loaded, 2 * x.block_type.nbytes + len(columns) * weight.block_type.nbytes)
        for group in gl.static_range(2):
            rows = x_buffers.index(2 * buffer + group)
            tma.async_copy_global_to_shared(x, [row + group * num_rows, at], loaded, rows)
        for part in gl.static_range(len(columns)):
            tma.async_copy_global_to_shared(weight, [columns[part], at], loaded, halves.slice(part * half, half))


@jit
def _load_tiles(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    buffers: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,  # num_row_tiles, num_column_tiles, num_whole_tiles, num_steps
    epilogue: gl.constexpr,
) -> None:
    """Load every tile of this program, in order."""
    num_row_tiles, num_column_tiles, num_whole_tiles, num_steps = sizes
    tile_rows: gl.constexpr = 2 * buffers[0].shape[1]
    half: gl.constexpr = weight.block_type.shape[0]
    tile_columns: gl.constexpr = 2 * half if epilogue == "add" else half
    second_half = half if epilogue == "add" else num_column_tiles * half  # from the first on
    step = 0
    for tile in range(gl.program_id(0), num_whole_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of(tile, num_row_tiles, num_column_tiles)
        row, column = row_tile * tile_rows, column_tile * tile_columns
        _load_tile(x, weight, buffers, barriers, row, (column, column + second_half), step, num_steps)
        step += num_steps
    if epilogue == "add":
        tile = num_whole_tiles + gl.program_id(0) // 2
        if tile < num_row_tiles * num_column_tiles:
            row_tile, column_tile = _place_of(tile, num_row_tiles, num_column_tiles)
            row, column = row_tile * tile_rows, (2 * column_tile + gl.program_id(0) % 2) * half
            _load_tile(x, weight, buffers, barriers, row, (column,), step, num_steps)


@jit
def _begin_step(
    acc: gl.tensor, step: gl.tensor, group: gl.constexpr, buffers: gl.tuple, barriers: gl.tuple, is_first: gl.constexpr
) -> gl.tensor:
    """Begin to add the product of a step."""
    x_buffers, weight_buffers = buffers
    ready, _ = barriers
    buffer, is_odd = step % _NUM_BUFFERS, (step // _NUM_BUFFERS) % 2
    mbarrier.wait(ready.index(buffer), is_odd)
    rows, columns = x_buffers.index(2 * buffer + group), weight_buffers.index(buffer)
    if acc.shape[1] < columns.shape[0]:
        columns = columns.slice(0, acc.shape[1])
    return warpgroup_mma(rows, columns.permute((1, 0)), acc, use_acc=not is_first, is_async=True)


@jit
def _nothing(num_columns: gl.constexpr, x_buffers: gl.shared_memory_descriptor) -> gl.tensor:
    """An accumulator of a group's rows."""
    num_rows: gl.constexpr = x_buffers.shape[1]
    inner: gl.constexpr = 256 // x_buffers.dtype.primitive_bitwidth  # that an instruction sums over
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, num_columns, inner])
    return gl.zeros([num_rows, num_columns], gl.float32, of_acc)


@jit
def _multiply_tile(
    nothing: gl.tensor,  # [R, 2 C], or [R, C] for half a tile
    place: gl.tuple,  # row and column in `out`
    before: gl.tuple,  # the tile before, to be stored: rounded [R, C], its row and its column
    step: gl.tensor,  # number of the first
    work: gl.tuple,
    group: gl.constexpr,
    epilogue: gl.constexpr,
) -> gl.tensor:
    """The rows of one group, rounded."""
    out, stored, buffers, barriers, sizes, scales, exponents = work
    _, free = barriers
    _, num_column_tiles, _, num_steps = sizes
    rounded, row, column = before
    acc = nothing
    for number in gl.static_range(_NUM_PARTS + 1):
        token = _begin_step(acc, step, group, buffers, barriers, number == 0)
        if number > 0:
            store_part(number - 1, group, rounded, row, column, out, stored, exponents, epilogue)
        acc = warpgroup_mma_wait(1, deps=[token])
        if number > 0:
            mbarrier.arrive(free.index((step - 1) % _NUM_BUFFERS))
        step += 1
    tile_scales = ()
    if len(scales) == 2:
        first_up = num_column_tiles * _NUM_PARTS * stored.shape[2]
        tile_scales = load_scales(scales, out.shape[0], place[0], place[1], first_up, nothing, epilogue)
    for number in range(_NUM_PARTS + 1, num_steps):  # noqa: B007  # `_` is a tensor here
        token = _begin_step(acc, step, group, buffers, barriers, False)
        acc = warpgroup_mma_wait(1, deps=[token])
        mbarrier.arrive(free.index((step - 1) % _NUM_BUFFERS))
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((step - 1) % _NUM_BUFFERS))
    return round_sums(acc, tile_scales, out.dtype, epilogue)


@jit
def _multiply(
    work: gl.tuple,  # `out`, memory for parts of it [2 * num_slots, R, P]; buffers, barriers, sizes, scales, exponents
    group: gl.constexpr,
    epilogue: gl.constexpr,
) -> None:
    """The rows of one group, of every tile of this program."""
    out, stored, buffers, _, sizes, _, exponents = work
    x_buffers, weight_buffers = buffers
    num_row_tiles, num_column_tiles, num_whole_tiles, num_steps = sizes
    num_rows: gl.constexpr = x_buffers.shape[1]
    half: gl.constexpr = weight_buffers.shape[1] // 2
    tile_columns: gl.constexpr = _NUM_PARTS * stored.shape[2]  # of `out`
    nothing = _nothing(2 * half, x_buffers)
    # What is to be stored: at first nothing, below the last row of `out`.
    rounded = round_sums(nothing, (), out.dtype, epilogue)
    row, column = num_row_tiles * 2 * num_rows, 0
    step = 0
    for tile in range(gl.program_id(0), num_whole_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of(tile, num_row_tiles, num_column_tiles)
        next_row, next_column = (row_tile * 2 + group) * num_rows, column_tile * tile_columns
        before = (rounded, row, column)
        rounded = _multiply_tile(nothing, (next_row, next_column), before, step, work, group, epilogue)
        row, column = next_row, next_column
        step += num_steps
    has_half = False
    if epilogue == "add":
        tile = num_whole_tiles + gl.program_id(0) // 2
        has_half = tile < num_row_tiles * num_column_tiles
        if has_half:
            row_tile, column_tile = _place_of(tile, num_row_tiles, num_column_tiles)
            place = ((row_tile * 2 + group) * num_rows, (2 * column_tile + gl.program_id(0) % 2) * half)
            before = (rounded, row, column)
            last = _multiply_tile(_nothing(half, x_buffers), place, before, step, work, group, epilogue)
            for part in gl.static_range(_NUM_PARTS // 2):
                store_part(part, group, last, place[0], place[1], out, stored, exponents, epilogue)
    if not has_half:
        for part in gl.static_range(_NUM_PARTS):
            store_part(part, group, rounded, row, column, out, stored, exponents, epilogue)
    tma.store_wait(0)


@jit
def gemm_kernel(
    x: tma.tensor_descriptor,  # of [T, D], loaded as [R, S]
    weight: tma.tensor_descriptor,  # of [2 F, D], gate and then up, or of [O, D], loaded as [C, S]
    out: tma.tensor_descriptor,  # of [T, F] or [T, O], stored as [R, P]
    num_row_tiles: gl.tensor,
    num_column_tiles: gl.tensor,
    num_whole_tiles: gl.tensor,  # tiles behind them are two programs' each
    num_steps: gl.tensor,
    row_scales: gl.tensor,  # [T] float32, of codes; else None
    channel_scales: gl.tensor,  # [2 F] or [O] float32
    exponents: gl.tensor,  # [F / P, T] uint8, of the scales of codes in `out`; else None
    epilogue: gl.constexpr,  # silu, gelu_tanh: activate; add: to what is in `out`
) -> None:
    """Some tiles of `out`."""
    num_rows: gl.constexpr = x.block_type.shape[0]
    step_size: gl.constexpr = x.block_type.shape[1]
    half: gl.constexpr = weight.block_type.shape[0]
    part_size: gl.constexpr = out.block_type.shape[1]
    x_buffers = gl.allocate_shared_memory(x.dtype, [2 * _NUM_BUFFERS, num_rows, step_size], x.layout)
    weight_buffers = gl.allocate_shared_memory(x.dtype, [_NUM_BUFFERS, 2 * half, step_size], weight.layout)
    # There is memory for C columns of a group: all parts of a tile, or half of them.
    stored = gl.allocate_shared_memory(out.dtype, [2 * (half // part_size), num_rows, part_size], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(_NUM_BUFFERS):
        mbarrier.init(ready.index(number), count=1)
        mbarrier.init(free.index(number), count=2)

    buffers, barriers = (x_buffers, weight_buffers), (ready, free)
    sizes = (num_row_tiles, num_column_tiles, num_whole_tiles, num_steps)
    scales = () if row_scales is None else (row_scales, channel_scales)
    work = (out, stored, buffers, barriers, sizes, scales, exponents)
    gl.warp_specialize(
        [
            (_multiply, (work, 0, epilogue)),
            (_multiply, (work, 1, epilogue)),
            (_load_tiles, (x, weight, buffers, barriers, sizes, epilogue)),
        ],
        [4, 1],
        [240, 24],
    )


def gated_gemm(
    x: Tensor,
    weight: Tensor,
    activation: Activation,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    exponents: Tensor | None = None,
) -> None:
    """activation(x @ gate.T) * (x @ up.T): x [T, D] and weight [2 F, D] to the first F columns of `out`. `scales`: in
    FP8 those of the rows [T] and of the weight [2 F]. `out` are then codes of parts, whose scales have the `exponents`
    [F / 32, T], and which `rescale` makes codes of rows."""
    if exponents is not None:
        assert ACTIVATION_PART * _NUM_PARTS.value == _HALF_COLUMNS, "a part of a tile is one of a row"
        assert exponents.shape == (len(weight) // 2 // ACTIVATION_PART, len(x))
    _launch(x, weight, out[:, : len(weight) // 2], _HALF_COLUMNS, scales, activation, exponents)


def residual_gemm(x: Tensor, weight: Tensor, out: Tensor, scales: tuple[Tensor, Tensor] | None = None) -> None:
    """out [T, O] becomes out + x @ weight.T, each rounded: the first D columns of x with weight [O, D]. `scales`: in
    FP8 those of the rows [T] and of the weight [O]."""
    _launch(x, weight, out[:, : len(weight)], 2 * _HALF_COLUMNS, scales, "add")


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile_columns: int,  # of `out`
    scales: tuple[Tensor, Tensor] | None,
    epilogue: str,
    exponents: Tensor | None = None,
) -> None:
    inner, step_size = weight.shape[1], _STEP_BYTES // weight.dtype.itemsize
    num_row_tiles, num_column_tiles = triton.cdiv(len(x), _TILE_ROWS), out.shape[1] // tile_columns
    num_tiles, processors = num_row_tiles * num_column_tiles, num_processors(x)
    num_halved = _num_halved(num_tiles, processors) if epilogue == "add" else 0
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        gemm_kernel[(min(num_tiles + num_halved, processors),)](
            describe(x[:, :inner], [_GROUP_ROWS, step_size]),
            describe(weight, [_HALF_COLUMNS, step_size]),
            describe(out, [_GROUP_ROWS, tile_columns // _NUM_PARTS.value]),
            *(num_row_tiles, num_column_tiles, num_tiles - num_halved, inner // step_size),
            *(*(scales or (None, None)), exponents),
            epilogue=epilogue,
            **OPTIONS,
        )


def num_processors(tensor: Tensor) -> int:
    """Multiprocessors of its GPU."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def _num_halved(num_tiles: int, processors: int) -> int:
    """How many tiles are two programs' each: those of the last turn, where that gives no program more than one half."""
    rest = num_tiles % processors
    return rest if 2 * rest <= processors else 0


def rows_of_both_tiles(num_columns: int, processors: int, row_unit: int) -> int:
    """The least multiple of `row_unit`, from MIN_ROWS on, that makes whole and halved tiles where the GEMM adds."""
    least = -(-MIN_ROWS // row_unit) * row_unit
    for num_rows in range(least, least + processors * row_unit, row_unit):
        num_tiles = -(-num_rows // _TILE_ROWS) * (num_columns // (2 * _HALF_COLUMNS))
        if 0 < _num_halved(num_tiles, processors) < num_tiles:
            return num_rows
    return least


def has_gated_gemm(weight: Tensor) -> bool:
    """Can the matrix [2 F, D] of gate and up be multiplied here?"""
    return _has_gemm(weight)


def has_residual_gemm(weight: Tensor) -> bool:
    """Can the matrix [O, D] be multiplied here?"""
    return _has_gemm(weight)


def _has_gemm(weight: Tensor) -> bool:
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) != HOPPER:
        return False
    num_steps, rest = divmod(weight.shape[1] * weight.dtype.itemsize, _STEP_BYTES)
    fits = len(weight) % (2 * _HALF_COLUMNS) == 0 and rest == 0
    return fits and num_steps >= _MIN_STEPS and weight.dtype in (torch.bfloat16, torch.float16, FP8)


def is_residual_gemm_fast(out: Tensor) -> bool:
    """Has `out` [T, O] rows enough, and do its tiles nearly fill the last turn of the multiprocessors, too?"""
    num_tiles = triton.cdiv(len(out), _TILE_ROWS) * (out.shape[1] // (2 * _HALF_COLUMNS))
    processors = num_processors(out)
    num_halved = _num_halved(num_tiles, processors)
    num_turns = triton.cdiv(num_tiles - num_halved, processors) + (_HALF_TURN if num_halved else 0.0)
    return len(out) >= _MIN_ADDED_ROWS and num_tiles >= _MIN_FILL * num_turns * processors
