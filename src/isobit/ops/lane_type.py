"""The type of thirty-two float32 lanes as one value, and the operators on it: each is the scalar one in every lane.

A float32 beside lanes stands for itself in every lane. Comparisons give a mask, which `scalar.select` takes.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

LANES = 32

INDEX = ir.IntType(32)
VECTOR = ir.VectorType(ir.FloatType(), LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


class LanesType(types.Type):
    def __init__(self):
        super().__init__(name=f"float32x{LANES}")


class MaskType(types.Type):
    def __init__(self):
        super().__init__(name=f"bool_x{LANES}")


lanes_type = LanesType()
mask_type = MaskType()


@register_model(LanesType)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, VECTOR)


@register_model(MaskType)
class MaskModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, _MASK)


def widest(*arguments: types.Type) -> types.Type:
    """The type of a result in every lane: lanes if any argument is, else float32."""
    return lanes_type if lanes_type in arguments else types.float32


def in_every_lane(builder, value):
    """A scalar in every lane; lanes as they are."""
    if isinstance(value.type, ir.VectorType):
        return value
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, INDEX(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INDEX, LANES), [0] * LANES))


def call_on_lanes(builder, name: str, arguments: list):
    """The LLVM intrinsic `name` on lanes."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"{name}.v{LANES}f32"), arguments)


def _add_operator(function: Any, result: types.Type, arguments: int, emit: Callable) -> None:
    class Typing(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == arguments and lanes_type in args and all(a in (lanes_type, types.float32) for a in args):
                return signature(result, *args)
            return None

    def lower(context, builder, sig, args):
        return emit(builder, *(in_every_lane(builder, value) for value in args))

    infer_global(function)(Typing)
    kinds = [(lanes_type,)] if arguments == 1 else [(lanes_type,) * 2, (lanes_type, types.float32)]
    for kind in {*kinds, *(tuple(reversed(kind)) for kind in kinds)}:
        lower_builtin(function, *kind)(lower)


_add_operator(operator.add, lanes_type, 2, lambda builder, a, b: builder.fadd(a, b))
_add_operator(operator.sub, lanes_type, 2, lambda builder, a, b: builder.fsub(a, b))
_add_operator(operator.mul, lanes_type, 2, lambda builder, a, b: builder.fmul(a, b))
_add_operator(operator.truediv, lanes_type, 2, lambda builder, a, b: builder.fdiv(a, b))
_add_operator(operator.lt, mask_type, 2, lambda builder, a, b: builder.fcmp_ordered("<", a, b))
_add_operator(operator.gt, mask_type, 2, lambda builder, a, b: builder.fcmp_ordered(">", a, b))
_add_operator(operator.ge, mask_type, 2, lambda builder, a, b: builder.fcmp_ordered(">=", a, b))
_add_operator(operator.neg, lanes_type, 1, lambda builder, a: builder.fneg(a))
_add_operator(abs, lanes_type, 1, lambda builder, a: call_on_lanes(builder, "llvm.fabs", [a]))
