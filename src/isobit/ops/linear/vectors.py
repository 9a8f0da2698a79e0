"""Short helpers that write LLVM vector code, for kernels that must not depend on what a compiler vectorises.

Addresses are int64 everywhere: a kernel gets the place of its arrays, and whoever calls it holds them.
"""

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

INT = ir.IntType(32)
INDEX = ir.IntType(64)
FLOAT = ir.FloatType()
HALF = ir.HalfType()
SHORT = ir.IntType(16)
BYTE = ir.IntType(8)


def has_feature(name: str) -> bool:
    """Whether Numba compiles for a CPU with this feature (the host's, unless the user set another)."""
    return f"+{name}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def splat(element: ir.Type, value, lanes: int) -> ir.Constant:
    """A constant in every lane."""
    return ir.Constant(vector(element, lanes), [value] * lanes)


def broadcast(builder, scalar, lanes: int):
    """A scalar in every lane."""
    undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, INT(0))
    return builder.shuffle_vector(first, undefined, splat(INT, 0, lanes))


def shuffle(builder, a, b, lanes: list[int]):
    """The given lanes of a and b laid end to end."""
    return builder.shuffle_vector(a, b, ir.Constant(vector(INT, len(lanes)), lanes))


def pointer(builder, address, element: ir.Type, offset: int = 0):
    """A typed pointer `offset` bytes past an integer address."""
    moved = builder.add(address, INDEX(offset)) if offset else address
    return builder.inttoptr(moved, element.as_pointer())


def load(builder, address, element: ir.Type, offset: int = 0, align: int = 4):
    return builder.load(pointer(builder, address, element, offset), align=align)


def store(builder, value, address, offset: int = 0, align: int = 4):
    builder.store(value, pointer(builder, address, value.type, offset), align=align)


def prefetch(builder, address):
    """Ask for the cache line at an address, soon to be read."""
    byte = builder.inttoptr(address, BYTE.as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [byte, INT(0), INT(3), INT(1)])


def fma(builder, a, b, c):
    """a * b + c in every lane, rounded once."""
    lanes = a.type.count
    return _call(builder, f"llvm.fma.v{lanes}f32", a.type, [a, b, c])


def sum_of_bytes(builder, words):
    """The sum of the four bytes of every 32-bit lane (8 lanes)."""
    lanes = words.type.count
    if lanes == 8 and has_feature("avx2"):
        pairs = _call(
            builder,
            "llvm.x86.avx2.pmadd.ub.sw",
            vector(SHORT, 16),
            [builder.bitcast(words, vector(BYTE, 32)), splat(BYTE, 1, 32)],
        )
        return _call(builder, "llvm.x86.avx2.pmadd.wd", vector(INT, 8), [pairs, splat(SHORT, 1, 16)])
    even_bytes = splat(INT, 0x00FF00FF, lanes)
    pairs = builder.add(
        builder.and_(words, even_bytes), builder.and_(builder.lshr(words, splat(INT, 8, lanes)), even_bytes)
    )
    both = builder.add(pairs, builder.lshr(pairs, splat(INT, 16, lanes)))
    return builder.and_(both, splat(INT, 0xFFFF, lanes))


def _call(builder, name: str, result: ir.Type, arguments: list):
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)
