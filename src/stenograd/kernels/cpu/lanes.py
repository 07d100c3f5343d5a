"""Operations on 32 floats at once, which numba's own loops are not compiled to.

Each is a few lines of LLVM's portable vector code: a comparison whose 32 results become the bits of one
integer. So a loop over the gradient takes one branch per 32 elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

__all__ = [
    "add_signs_32",
    "as_pointer",
    "at_least_32",
    "load_word",
    "lowering",
    "lowest_bit",
    "not_negative_32",
]


def lowering(function: Callable[..., Any]) -> Any:
    """Make a function that returns a type and its LLVM code into one that kernels can call.

    Example:
        >>> lowering(lambda typing, x: None).__class__.__name__
        '_Intrinsic'
    """
    return intrinsic(function)


_LANES = ir.VectorType(ir.IntType(32), 32)
_FLOATS = ir.VectorType(ir.FloatType(), 32)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, start: Any, to: Any) -> Any:
    """Return the address of `array[start]` as a pointer to another type."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), to.as_pointer())


def _splat(builder: Any, scalar: Any, to: Any) -> Any:
    first = builder.insert_element(ir.Constant(to, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), 32), None)
    return builder.shuffle_vector(first, ir.Constant(to, ir.Undefined), zeros)


@lowering
def at_least_32(typing: Any, array: Any, start: Any, bound: Any) -> Any:
    """Return one bit for each of 32 floats: whether its bits, less the sign, are at least `bound`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], _LANES), align=4)
        magnitude = builder.and_(lanes, ir.Constant(_LANES, [0x7FFFFFFF] * 32))
        hit = builder.icmp_unsigned(">=", magnitude, _splat(builder, args[2], _LANES))
        return builder.bitcast(hit, ir.IntType(32))

    return types.uint32(array, types.int64, types.uint32), code


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
def load_word(typing: Any, array: Any, start: Any) -> Any:
    """Return eight bytes as one integer, from any address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], word), align=1)

    return types.uint64(array, types.int64), code


@lowering
def lowest_bit(typing: Any, word: Any) -> Any:
    """Return the place of the lowest set bit of an integer that is not 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.cttz(args[0], ir.Constant(ir.IntType(1), 1)), ir.IntType(64))

    return types.int64(types.uint32), code


@lowering
def as_pointer(typing: Any, address: Any) -> Any:
    """Return the pointer to an address that is given as an integer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code
