"""Operations on 32 floats at once, which numba's own loops are not compiled to.

Each is a few lines of LLVM's portable vector code: a comparison whose 32 results become the bits of one
integer. So a loop over the gradient takes one branch per 32 elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "add_magnitudes_256",
    "add_signs_32",
    "as_pointer",
    "at_least_32",
    "bit_count",
    "in_pairs_32",
    "load_word",
    "lowering",
    "lowest_bit",
    "not_negative_32",
    "prefetch_32",
    "round_32",
    "store_word",
    "stream_32",
    "sum_at_least_32",
    "sum_magnitudes_256",
    "take_signs_32",
    "wait_for_streams",
]


def lowering(function: Callable[..., Any]) -> Any:
    """Make a function that returns a type and its LLVM code into one that kernels can call.

    Example:
        >>> lowering(lambda typing, x: None).__class__.__name__
        '_Intrinsic'
    """
    return intrinsic(function)


insert_function: Any = cgutils.get_or_insert_function
_LANES = ir.VectorType(ir.IntType(32), 32)
_FLOATS = ir.VectorType(ir.FloatType(), 32)
_HALVES = ir.VectorType(ir.IntType(16), 32)
_BYTES = ir.VectorType(ir.IntType(8), 32)
_DOUBLES = ir.VectorType(ir.DoubleType(), 32)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, start: Any, to: Any) -> Any:
    """Return the address of `array[start]` as a pointer to another type."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), to.as_pointer())


def _splat(builder: Any, scalar: Any, to: Any) -> Any:
    first = builder.insert_element(ir.Constant(to, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), 32), None)
    return builder.shuffle_vector(first, ir.Constant(to, ir.Undefined), zeros)


def _at_least(builder: Any, lanes: Any, bound: Any) -> Any:
    """Return one bit for each of 32 magnitudes, as integers: no less than `bound`."""
    magnitude = builder.and_(lanes, ir.Constant(_LANES, [0x7FFFFFFF] * 32))
    below = builder.sub(bound, ir.Constant(ir.IntType(32), 1))
    # No magnitude has its highest bit set, and AVX2 compares signed integers only.
    hit = builder.icmp_signed(">", magnitude, _splat(builder, below, _LANES))
    return builder.bitcast(hit, ir.IntType(32))


@lowering
def at_least_32(typing: Any, array: Any, start: Any, bound: Any) -> Any:
    """Return one bit for each of 32 floats: whether its bits, less the sign, are at least `bound`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _LANES)
        return _at_least(builder, builder.load(pointer, align=4), args[2])  # else LLVM relies on 128

    return types.uint32(array, types.int64, types.uint32), code


@lowering
def sum_at_least_32(typing: Any, array: Any, addend: Any, start: Any, bound: Any) -> Any:
    """Add 32 floats to others, and then do what `at_least_32` does."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into, more = (
            _pointer(context, builder, kind, value, args[2], _FLOATS)
            for kind, value in zip(signature.args[:2], args[:2], strict=True)
        )
        total = builder.fadd(builder.load(into, align=4), builder.load(more, align=4))
        builder.store(total, into, align=4)
        return _at_least(builder, builder.bitcast(total, _LANES), args[3])

    return types.uint32(array, addend, types.int64, types.uint32), code


@lowering
def not_negative_32(typing: Any, array: Any, start: Any) -> Any:
    """Return one bit for each of 32 floats: whether it is at least 0 (-0.0 is, NaN is not)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = builder.load(
            _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS), align=4
        )
        hit = builder.fcmp_ordered(">=", lanes, ir.Constant(_FLOATS, [0.0] * 32))
        return builder.bitcast(hit, ir.IntType(32))

    return types.uint32(array, types.int64), code


@lowering
def take_signs_32(typing: Any, array: Any, start: Any, scale: Any) -> Any:
    """Do what `not_negative_32` does, and subtract `scale` from floats whose bit is set, or else add it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        lanes = builder.load(pointer, align=4)
        hit = builder.fcmp_ordered(">=", lanes, ir.Constant(_FLOATS, [0.0] * 32))
        plus, minus = (_splat(builder, s, _FLOATS) for s in (args[2], builder.fneg(args[2])))
        builder.store(builder.fsub(lanes, builder.select(hit, plus, minus)), pointer, align=4)
        return builder.bitcast(hit, ir.IntType(32))

    return types.uint32(array, types.int64, types.float32), code


@lowering
def prefetch_32(typing: Any, array: Any, start: Any) -> Any:
    """Ask for 32 floats to be brought to the cache, from any place: one outside the array does no harm."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        ask = insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, data = (ir.Constant(number, k) for k in (0, 3, 1))
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(8))
        for line in (0, 64):  # 32 floats are two lines
            builder.call(ask, [builder.gep(pointer, [ir.Constant(number, line)]), read, keep, data])
        return context.get_dummy_value()

    return types.none(array, types.int64), code


@lowering
def add_signs_32(typing: Any, array: Any, start: Any, word: Any, scale: Any) -> Any:
    """Add `scale` to those of 32 floats whose bit of `word` is set, and subtract it from the others."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        chosen = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), 32))
        plus, minus = (_splat(builder, s, _FLOATS) for s in (args[3], builder.fneg(args[3])))
        lanes = builder.fadd(builder.load(pointer, align=4), builder.select(chosen, plus, minus))
        builder.store(lanes, pointer, align=4)
        return context.get_dummy_value()

    return types.none(array, types.int64, types.uint32, types.float32), code


@lowering
def add_magnitudes_256(typing: Any, array: Any, start: Any, sums: Any) -> Any:
    """Add an eighth of 256 magnitudes to 32 float64: eight of them, 32 indices apart, are summed first."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        into = _pointer(context, builder, signature.args[2], args[2], _int64(0), _DOUBLES)
        _add_eighths(builder, into, lambda i: builder.load(builder.gep(pointer, [_int64(i)]), align=4))
        return context.get_dummy_value()

    return types.none(array, types.int64, sums), code


@lowering
def sum_magnitudes_256(typing: Any, array: Any, addend: Any, start: Any, sums: Any) -> Any:
    """Add `addend` to 256 floats in place, and then do what `add_magnitudes_256` does."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        pointer, more = (_pointer(context, builder, kinds[i], args[i], args[2], _FLOATS) for i in (0, 1))
        into = _pointer(context, builder, kinds[3], args[3], _int64(0), _DOUBLES)

        def summed(i: int) -> Any:
            place = builder.gep(pointer, [_int64(i)])
            lanes = builder.fadd(
                builder.load(place, align=4), builder.load(builder.gep(more, [_int64(i)]), align=4)
            )
            builder.store(lanes, place, align=4)
            return lanes

        _add_eighths(builder, into, summed)
        return context.get_dummy_value()

    return types.none(array, addend, types.int64, sums), code


def _int64(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _add_eighths(builder: Any, into: Any, lanes_of: Callable[[int], Any]) -> None:
    """Add up an eighth of the magnitudes of eight times 32 floats, and add that to 32 float64."""
    eight = None
    for i in range(8):
        bits = builder.bitcast(lanes_of(i), _LANES)
        lanes = builder.bitcast(builder.and_(bits, ir.Constant(_LANES, [0x7FFFFFFF] * 32)), _FLOATS)
        # so that eight of them cannot overflow
        lanes = builder.fmul(lanes, ir.Constant(_FLOATS, [0.125] * 32))
        eight = lanes if eight is None else builder.fadd(eight, lanes)
    total = builder.fadd(builder.load(into, align=8), builder.fpext(eight, _DOUBLES))
    builder.store(total, into, align=8)


@lowering
def in_pairs_32(typing: Any, sums: Any) -> Any:
    """Return the sum of 32 float64: the second half is added to the first, until one is left."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(ir.IntType(64), 0)
        lanes = builder.load(_pointer(context, builder, signature.args[0], args[0], zero, _DOUBLES), align=8)
        for half in (16, 8, 4, 2, 1):  # the order of `kernels.sign.lane_means`
            number = ir.VectorType(ir.IntType(32), half)
            first, second = (
                builder.shuffle_vector(lanes, lanes, ir.Constant(number, list(range(at, at + half))))
                for at in (0, half)
            )
            lanes = builder.fadd(first, second)
        return builder.extract_element(lanes, ir.Constant(ir.IntType(32), 0))

    return types.float64(sums), code


@lowering
def round_32(
    typing: Any,
    array: Any,
    start: Any,
    draws: Any,
    first: Any,
    codes: Any,
    inverse: Any,
    levels: Any,
    step: Any,
) -> Any:
    """Write `min(max(floor(u + v inverse + levels), 0), 2 levels)` of 32 floats v as bytes; NaN becomes 0.

    u is 2^-16 of 32 of `draws`, from `first` on, and code i goes to `codes[start + i]`. Where step is not 0,
    v becomes `v - (code - levels) step`.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        pointer = _pointer(context, builder, kinds[0], args[0], args[1], _FLOATS)
        lanes = builder.load(pointer, align=4)
        drawn = builder.load(_pointer(context, builder, kinds[2], args[2], args[3], _HALVES), align=2)
        drawn = builder.sitofp(builder.zext(drawn, _LANES), _FLOATS)
        y = builder.fmul(drawn, ir.Constant(_FLOATS, [2.0**-16] * 32))
        inverse, levels, step = (_splat(builder, s, _FLOATS) for s in args[5:8])
        y = builder.fadd(builder.fadd(y, builder.fmul(lanes, inverse)), levels)
        zero, most = ir.Constant(_FLOATS, [0.0] * 32), builder.fadd(levels, levels)
        y = builder.select(builder.fcmp_ordered(">", y, zero), y, zero)  # ordered: NaN becomes 0
        y = builder.select(builder.fcmp_ordered("<", y, most), y, most)
        whole = builder.fptosi(y, _LANES)  # floor, since y >= 0
        to = _pointer(context, builder, kinds[4], args[4], args[1], _BYTES)
        builder.store(builder.trunc(whole, _BYTES), to, align=1)
        with builder.if_then(builder.fcmp_unordered("!=", args[7], ir.Constant(ir.FloatType(), 0.0))):
            sent = builder.fmul(builder.fsub(builder.sitofp(whole, _FLOATS), levels), step)
            builder.store(builder.fsub(lanes, sent), pointer, align=4)
        return context.get_dummy_value()

    words = (types.float32, types.float32, types.float32)
    return types.none(array, types.int64, draws, types.int64, codes, *words), code


@lowering
def load_word(typing: Any, array: Any, start: Any) -> Any:
    """Return eight bytes as one integer, from any address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], word), align=1)

    return types.uint64(array, types.int64), code


@lowering
def store_word(typing: Any, array: Any, start: Any, value: Any) -> Any:
    """Write one integer as eight bytes, to any address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(64))
        builder.store(args[2], pointer, align=1)
        return context.get_dummy_value()

    return types.none(array, types.int64, types.uint64), code


@lowering
def stream_32(typing: Any, array: Any, start: Any, source: Any, at: Any, factor: Any) -> Any:
    """Write 32 floats times a factor past the caches; `array[start]` must lie at a multiple of 64 bytes.

    Call `wait_for_streams` at the end.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        lanes = builder.load(_pointer(context, builder, kinds[2], args[2], args[3], _FLOATS), align=4)
        lanes = builder.fmul(lanes, _splat(builder, args[4], _FLOATS))
        store = builder.store(
            lanes, _pointer(context, builder, kinds[0], args[0], args[1], _FLOATS), align=64
        )
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.none(array, types.int64, source, types.int64, types.float32), code


@lowering
def wait_for_streams(typing: Any) -> Any:
    """Let other threads see what `stream_32` wrote before anything that is written later."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), code


@lowering
def lowest_bit(typing: Any, word: Any) -> Any:
    """Return the place of the lowest set bit of an integer, or how many it has if none is set."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))
        return place if signature.args[0].bitwidth == 64 else builder.zext(place, ir.IntType(64))

    return types.int64(word), code


@lowering
def bit_count(typing: Any, word: Any) -> Any:
    """Return how many bits of an integer are set."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), code


@lowering
def as_pointer(typing: Any, address: Any) -> Any:
    """Return the pointer to an address that is given as an integer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code
