"""Makes Triton's interpreter ten times as fast, without changing what it computes.

For every operation the interpreter works out what never changes: the builtins to replace, the types of operands and
results, the numpy dtype of an element type, the shape of a block as objects with printable types. Here these are
remembered. Operands are not copied to a common shape: numpy does that as it computes. Checks for integer overflow,
which compiled kernels do not have either, are off. Conversions to and from FP8 are torch's: the interpreter of Triton
3.6 loses the carry of a rounded mantissa, subnormal numbers and NaN.

Operators (`_UFUNCS`), casts, loads, stores and new axes (`x[:, None]`) are a single numpy call each. Their first use
with given types is the interpreter's own; where the numpy call does not give the same bits, it remains so.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

_UFUNCS = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__truediv__": np.divide,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "__mod__": np.fmod,
}
_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_BIT_PATTERNS = ("bf16", "fp8")  # numpy does not have these types: their elements are stored as integers
_TORCH_TYPES = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SCALAR = "scalar"  # the key of `_shapes` for tensors that are no block


class _LazyName:
    """The name of a tuple type, built when it is read."""

    def __get__(self, instance: Any, owner: type) -> str:
        return f"[{','.join(f'{key}:{value}' for key, value in zip(instance.fields, instance.types, strict=True))}]"


def _init_tuple_type(self: Any, types: Any, fields: Any = None) -> None:
    self.types, self.fields = types, fields or [""] * len(types)


def _key(operand: Any) -> Any:
    """What the types of a binary operation depend on: the type of a tensor, the type and value of a number."""
    if isinstance(operand, float):
        return operand.hex()  # tells 0.0 from -0.0
    return (type(operand), operand) if isinstance(operand, int) else operand.type.name


@contextmanager
def faster_interpreter() -> Iterator[None]:
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    semantic = TritonSemantic(builder)
    init_block_type, np_dtype_of = core.block_type.__init__, interpreter._get_np_dtype
    wrapping_nothing = {core.tensor, core.dtype, core.pointer_type, core.block_type, int, float, bool, str, type(None)}
    convert_float = interpreter._convert_float
    unwrap, types_equal, patch_lang = core._unwrap_if_constexpr, core.dtype.__eq__, interpreter._patch_lang
    as_tensor, slow_cast, new_range = TritonSemantic.to_tensor, TritonSemantic.cast, TritonSemantic.arange
    load_by_pointers, store_by_pointers = TritonSemantic._load_legacy, TritonSemantic._store_legacy
    check_operands, broadcast_both = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    new_object, new_handle = object.__new__, interpreter.TensorHandle
    load_bytes, bool_dtype = interpreter._interpreter.load, np.dtype(bool)
    np_dtypes: dict[str, Any] = {}
    constants: dict[Any, Any] = {}  # tensors, by number
    ranges: dict[tuple[int, int], Any] = {}  # tensors of `arange`
    elements: dict[str, tuple[Any, Any]] = {}  # type and numpy dtype of what a pointer points to
    casts: dict[tuple[str, str], Any] = {}  # numpy dtype, element type and type of the result, by both types
    broadcasts: dict[tuple[str, str], Any] = {}  # types of the results of a broadcast
    stored: dict[tuple[Any, ...], Any] = {}  # element types, by the types of pointers, value and mask
    zeros: dict[tuple[Any, ...], Any] = {}  # by shape and numpy dtype
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}  # attributes, by element type and shape
    with_elements: dict[tuple[str, str], Any] = {}
    # Shapes and numbers of elements, by the name of a block type; one object per shape.
    shapes: dict[str, tuple[Any, Any]] = {_SCALAR: (core.tuple([]), core.constexpr(1))}
    operands: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # each the type of a tensor, or the tensor of a number
    loaded: dict[tuple[Any, ...], Any] = {}  # types, by those of pointers, mask and default
    all_true: dict[tuple[int, ...], Any] = {}  # masks, by shape
    scopes: dict[int, Any] = {}  # by the globals of a kernel: what was replaced there

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = element_ty.name, getattr(element_ty, "address_space", None), *sizes
        if key not in block_types:
            init_block_type(self, element_ty, shape)
            block_types[key] = dict(self.__dict__)
            shape = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
            shapes[self.name] = shapes.setdefault(str(sizes), shape)
        self.__dict__.update(block_types[key])

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = self.name, scalar_ty.name
        if key not in with_elements:
            with_elements[key] = core.block_type(scalar_ty, self.shape)
        return with_elements[key]

    def made(data: Any, element: Any, type: Any) -> Any:
        """A tensor of a type, without the calls and the checks of constructors."""
        handle, tensor = new_object(new_handle), new_object(core.tensor)
        handle.data, handle.dtype, handle.attr = data, element, {}
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = shapes[type.name if type.is_block() else _SCALAR]
        return tensor

    def in_shape(data: Any, shape: tuple[int, ...]) -> Any:
        """Like `np.broadcast_to`, which takes longer than a copy of so few elements."""
        if data.shape == shape:
            return data
        whole = np.empty(shape, data.dtype)
        whole[...] = data
        return whole

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name if type.is_block() else _SCALAR]

    def get_np_dtype(type: Any) -> Any:
        if type.name not in np_dtypes:
            np_dtypes[type.name] = np_dtype_of(type)
        return np_dtypes[type.name]

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > get_np_dtype(dtype).itemsize and not dtype.is_ptr():
            raise ValueError(f"elements of {data.itemsize} bytes for {dtype}")

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (source.name, target.name):
            return convert_float(data, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(_TORCH_TYPES[source.name]).float()
        unsigned = np.dtype(f"uint{target.primitive_bitwidth}")
        return wide.to(_TORCH_TYPES[target.name]).view(torch.uint8).numpy().view(unsigned).reshape(data.shape)

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if value.__class__ in wrapping_nothing else unwrap(value)

    def equal_types(self: Any, other: Any) -> bool:
        return self is other or types_equal(self, other)

    def operand(self: Any, value: Any, known: Any) -> Any:
        if isinstance(known, core.tensor):
            return known
        if value.type.name == known.name:
            return value
        return core.tensor(self.cast(value, known.scalar).handle, known)  # numpy broadcasts

    def check(self: Any, lhs: Any, rhs: Any, *options: bool) -> tuple[Any, Any]:
        key = _key(lhs), _key(rhs), options
        if key not in operands:
            results = check_operands(self, lhs, rhs, *options)
            left, right = (
                result.type if isinstance(value, core.tensor) else result
                for value, result in zip((lhs, rhs), results, strict=True)
            )
            operands[key] = left, right
        left, right = operands[key]
        return operand(self, lhs, left), operand(self, rhs, right)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key not in broadcasts:
            results = broadcast_both(self, lhs, rhs)
            broadcasts[key] = [(each.type, tuple(each.type.shape)) for each in results]
            return results
        return tuple(
            made(in_shape(each.handle.data, shape), each.handle.dtype, type)
            for each, (type, shape) in zip((lhs, rhs), broadcasts[key], strict=True)
        )  # type: ignore[return-value]

    def to_tensor(self: Any, value: Any, *options: bool) -> Any:
        if value.__class__ is core.tensor:
            return value
        if value.__class__ not in (int, float, bool):
            return as_tensor(self, value, *options)
        key = _key(value)
        if key not in constants:
            constants[key] = as_tensor(self, value, *options)
        return constants[key]

    def arange(self: Any, start: int, end: int, **options: Any) -> Any:
        if options.get("ret_ty") is not None:
            return new_range(self, start, end, **options)
        if (start, end) not in ranges:
            ranges[start, end] = new_range(self, start, end)
        return ranges[start, end]

    def cast(self: Any, value: Any, type: Any, rounding: Any = None) -> Any:
        before, after = value.type.scalar, type.scalar
        if before is after:
            return value
        if rounding is not None:
            return slow_cast(self, value, type, rounding)
        key = value.type.name, after.name
        found = casts.get(key)
        if found is not None:
            dtype, element, type = found
            return made(value.handle.data.astype(dtype), element, type)
        result = slow_cast(self, value, type)
        if key not in casts:
            data, wanted = value.handle.data, result.handle.data
            plain = not any(each.is_ptr() or each.name.startswith(_BIT_PATTERNS) for each in (before, after))
            same = plain and wanted.shape == data.shape and data.astype(wanted.dtype).tobytes() == wanted.tobytes()
            casts[key] = (wanted.dtype, result.handle.dtype, result.type) if same else None
        return result

    def pointed_at(pointers: Any) -> tuple[Any, Any]:
        type = pointers.dtype
        if type.name not in elements:
            element = pointers.get_element_ty()
            elements[type.name] = element, get_np_dtype(element)
        return elements[type.name]

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        element, dtype = pointed_at(pointers)
        if other is None:
            key = pointers.data.shape, dtype
            if key not in zeros:
                zeros[key] = np.zeros(*key)
            default = zeros[key]
        else:
            default = other.data
        handle = new_object(new_handle)
        handle.data, handle.dtype, handle.attr = (
            load_bytes(pointers.data, mask.data, default, dtype),
            element,
            {},
        )
        return handle

    def mask_of(mask: Any, shape: tuple[int, ...]) -> Any:
        """The elements of a mask, in the shape of the pointers."""
        if shape not in all_true:
            all_true[shape] = new_handle(np.ones(shape, bool), core.int1)
        if mask is None:
            return all_true[shape]
        data = mask.handle.data
        if data.shape == shape and data.dtype is bool_dtype:
            return mask.handle
        return new_handle(in_shape(data.astype(bool, copy=False), shape), core.int1)

    def load(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        key = pointers.type.name, None if mask is None else mask.type.name, None if other is None else other.type.name
        data = pointers.handle.data
        if key not in loaded:
            result = load_by_pointers(self, pointers, mask, other, *options)
            element = pointers.type.scalar.element_ty
            same = result.handle.data.shape == data.shape and result.type.scalar == element != core.int1
            loaded[key] = (
                result.type if same and (other is None or not element.name.startswith(_BIT_PATTERNS)) else None
            )
            return result
        type = loaded[key]
        if type is None:
            return load_by_pointers(self, pointers, mask, other, *options)
        if other is not None:
            default = other.handle.data.astype(get_np_dtype(type.scalar), copy=False)
            other = new_handle(in_shape(default, data.shape), type.scalar)
        handle = builder.create_masked_load(pointers.handle, mask_of(mask, data.shape), other, *options[2:])
        return made(handle.data, handle.dtype, type)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        key = pointers.type.name, value.type.name, None if mask is None else mask.type.name
        shape = pointers.handle.data.shape
        if key not in stored:
            result = store_by_pointers(self, pointers, value, mask, *options)
            element = pointers.type.scalar.element_ty
            stored[key] = None if element == core.int1 or value.type.scalar.is_ptr() else element
            return result
        if stored[key] is None:
            return store_by_pointers(self, pointers, value, mask, *options)
        handle = cast(self, value, stored[key]).handle
        if handle.data.shape != shape:
            handle = new_handle(in_shape(handle.data, shape), handle.dtype)
        return core.tensor(
            builder.create_masked_store(pointers.handle, handle, mask_of(mask, shape), *options[1:]), core.void
        )

    def computed_in(name: str, left: Any, right: Any, result: Any) -> Any:
        """The numpy dtype of both operands of an operator, or None if numpy and Triton may differ."""
        sides = [side for side in (left, right) if isinstance(side, core.tensor)]
        if any(side.type.scalar.name.startswith(_BIT_PATTERNS) for side in sides):
            return None
        if any(side.type.scalar.is_ptr() for side in sides):
            return np.dtype(np.uint64) if name == "__add__" and left.type.scalar.is_ptr() else None
        if name in _UFUNCS:
            return result.handle.data.dtype
        dtypes = [side.handle.data.dtype for side in sides]
        if len(sides) == 1:
            kinds = "iuf" if isinstance(right, int) else "f"
            return dtypes[0] if dtypes[0].kind in kinds and not isinstance(right, bool) else None
        return np.result_type(*dtypes) if dtypes[0].kind == dtypes[1].kind else None

    def numpy_call(name: str, left: Any, right: Any, result: Any) -> Callable[[Any, Any], Any] | None:
        """What gives `result`, the interpreter's, for these operands, and as much for all others of their types."""
        dtype = computed_in(name, left, right, result)
        if dtype is None:
            return None
        ufunc, type, element = (_UFUNCS | _COMPARISONS)[name], result.type, result.handle.dtype
        pointed, constant = getattr(left.type.scalar, "element_ty", None), None
        width = None if pointed is None else np.uint64(max(1, pointed.primitive_bitwidth // 8))

        scalar, (shape, numel) = type.scalar, shapes[type.name if type.is_block() else _SCALAR]

        def compute(left: Any, right: Any) -> Any:
            data = left.handle.data
            if data.dtype is not dtype:
                data = data.astype(dtype)
            other = constant
            if other is None:
                other = right.handle.data
                if other.dtype is not dtype:
                    other = other.astype(dtype)
                if width is not None:
                    other = width * other
            # As `made` does, without the call.
            handle, tensor = new_object(new_handle), new_object(core.tensor)
            handle.data, handle.dtype, handle.attr = ufunc(data, other), element, {}
            tensor.handle, tensor.type, tensor.dtype = handle, type, scalar
            tensor.shape, tensor.numel = shape, numel
            return tensor

        if not isinstance(right, core.tensor):
            if not np.iinfo(np.int64).min <= right <= np.iinfo(np.int64).max and dtype.kind != "f":
                return None
            constant = np.array([right]).astype(dtype)
            if width is not None:
                constant = width * constant
        found, wanted = compute(left, right).handle.data, result.handle.data
        same = found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
        return compute if same else None

    def operator(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        computes: dict[tuple[Any, ...], Callable[[Any, Any], Any] | None] = {}

        def call(left: Any, right: Any, **options: Any) -> Any:
            if right.__class__ is core.constexpr:
                right = right.value
            key = left.type.name, right.type.name if right.__class__ is core.tensor else _key(right)
            compute = computes.get(key)
            if compute is not None:
                return compute(left, right)
            result = slow(left, right)
            if key not in computes:
                computes[key] = numpy_call(name, left, right, result)
            return result

        return call

    def with_axes(slow: Callable[..., Any]) -> Callable[..., Any]:
        types: dict[tuple[Any, ...], Any] = {}

        def call(value: Any, slices: Any, **options: Any) -> Any:
            if slices.__class__ is not tuple:
                return slow(value, slices)
            key = value.type.name, *[each is None for each in slices]
            if key not in types:
                types[key] = slow(value, slices).type  # refuses all but new axes and whole ones
            type = types[key]
            return made(value.handle.data.reshape(type.shape), value.handle.dtype, type)

        return call

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = inspect.unwrap(member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        if place is core.tensor and name in _UFUNCS | _COMPARISONS:
            call = operator(name, call)
        if place is core.tensor and name == "__getitem__":
            call = with_axes(call)
        scope.set_attr(place, name, call)

    def patch_once(function: Any) -> Any:
        """Builtins stay replaced between launches."""
        if id(function.__globals__) not in scopes:
            scopes[id(function.__globals__)] = patch_lang(function)
        return interpreter._LangPatchScope()

    with ExitStack() as stack:
        for place, name, value in (
            (interpreter, "_get_np_dtype", get_np_dtype),
            (interpreter, "_convert_float", convert),
            (interpreter, "_patch_attr", patch_attr),
            (interpreter, "_patch_lang", patch_once),
            (interpreter.TensorHandle, "__init__", init_handle),
            (builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)),
            (core, "_unwrap_if_constexpr", unwrap_if_constexpr),
            (core.dtype, "__eq__", equal_types),
            (core.tuple_type, "__init__", _init_tuple_type),
            (core.block_type, "__init__", init_block),
            (core.block_type, "with_element_ty", with_element_ty),
            (core.block_type, "to_ir", lambda self, builder: self),
            (core.tensor, "__init__", init_tensor),
            (TritonSemantic, "to_tensor", to_tensor),
            (TritonSemantic, "_load_legacy", load),
            (TritonSemantic, "_store_legacy", store),
            (TritonSemantic, "cast", cast),
            (TritonSemantic, "arange", arange),
            (interpreter.InterpreterBuilder, "create_masked_load", masked_load),
            (TritonSemantic, "binary_op_type_checking_impl", check),
            (TritonSemantic, "broadcast_impl_value", broadcast),
        ):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(patch.object(core.tuple_type, "name", _LazyName(), create=True))
        yield
        for scope in reversed(scopes.values()):
            scope.restore()
