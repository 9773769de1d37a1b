"""A sandbox for chat templates: programs from a model file, which may be hostile.

Jinja's own sandbox limits neither time nor memory: `"x" | center(2000000000)` takes gigabytes. Here a template gets
only the filters and methods that templates need, every size is checked before anything is allocated, and all that it
makes is counted. A template that exceeds a limit fails, and only the request that it was rendered for.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from string import Formatter
from typing import Any, NoReturn

from jinja2 import TemplateAssertionError, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 200_000  # loop iterations and macro calls per rendering
MAX_CPU_S = 5.0
MAX_CHARACTERS = 64_000_000  # of the rendered text and of every intermediate string
_BASE_CHARACTERS, _FACTOR = 1_000_000, 16  # the same for short conversations, which need less
_TOTAL = 64  # all strings and lists together, in texts of the largest size
_ITEM_CHARACTERS = 8  # what an item of a list counts as
_MAX_NUMBER = 2**63
_MAX_WIDTH = 1_000  # of a field, an indentation or a precision
_STEPS_PER_CHECK = 64
# Behind the % of a field, and the key that it may have: flags, width, precision.
_PERCENT_FIELD = re.compile(r"[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_NUMBER = re.compile(r"\d+")
_REPR = 10  # characters that repr() makes of one, at most
_WIDE_DATE = re.compile(r"%[^%A-Za-z]*\d")
# Names that a template cannot set.
_LIMITS, _STEP, _JOIN, _MADE, _BUILT = "_limits", "_step", "_join", "_made", "_built"
LIMIT_NAMES = frozenset((_LIMITS, _STEP, _JOIN, _MADE, _BUILT))

_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format", "indent",
    "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
    "reverse", "round", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
    "urlencode",
)  # fmt: skip
_TEXT_FILTERS = (
    "capitalize",
    "escape",
    "e",
    "format",
    "indent",
    "lower",
    "replace",
    "title",
    "trim",
    "upper",
    "urlencode",
)
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        ("capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
         "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
         "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip",
         "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper")
    ),
    bytes: frozenset(),
    int: frozenset(),
    float: frozenset(),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
}  # fmt: skip


class LimitExceeded(Exception):
    """A template exceeds a limit, or uses what would."""


class TemplateRefusal(Exception):
    """Raised by a template's own raise_exception(...)."""


class Limits:
    """What one rendering has left."""

    def __init__(self, num_characters: int) -> None:
        """`num_characters`: of the conversation."""
        self.max_characters = min(MAX_CHARACTERS, _BASE_CHARACTERS + _FACTOR * num_characters)
        self._left = _TOTAL * self.max_characters
        self._steps = 0
        self._end = time.thread_time() + MAX_CPU_S  # of this thread: a busy host does not make a template slow

    def step(self) -> str:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise LimitExceeded(f"ran for more than {MAX_STEPS:,} steps")
        if not self._steps % _STEPS_PER_CHECK and time.thread_time() > self._end:
            raise LimitExceeded(f"ran for more than {MAX_CPU_S:g} s")
        return ""

    def check(self, length: int) -> None:
        """Checks the length of a string before it is made."""
        if length > self.max_characters:
            raise LimitExceeded(f"made a text of more than {self.max_characters:,} characters")

    def made(self, value: object) -> object:
        """Counts a value that was made, and returns it."""
        if isinstance(value, str | list | tuple):
            size = len(value) if isinstance(value, str) else _ITEM_CHARACTERS * len(value)
            self.check(size)
            self._left -= size
            if self._left < 0:
                raise LimitExceeded("made too many long texts")
            if size > 1_000_000 and time.thread_time() > self._end:
                raise LimitExceeded(f"ran for more than {MAX_CPU_S:g} s")
        elif isinstance(value, int) and not -_MAX_NUMBER < value < _MAX_NUMBER:
            raise LimitExceeded("made a number of more than 64 bits")
        return value

    def built(self, value: object) -> object:
        """The same for a new container: how much text it is, written out. One that contains another twice, and so on,
        would be endless."""
        self.check(weight(value, self.max_characters))
        return value

    def text(self, value: object) -> str:
        """str(value)."""
        if not isinstance(value, str):
            self.built(value)
            return str(value)
        return value

    def join(self, *parts: object) -> str:
        """What the operator ~ does."""
        texts = [self.text(part) for part in parts]
        self.check(sum(map(len, texts)))
        found = "".join(texts)
        self.made(found)
        return found

    def weight(self, value: object) -> int:
        return weight(value, self.max_characters)


def weight(value: object, most: float = math.inf) -> int:
    """About how many characters a value has when it is written out. Stops counting at `most`."""
    found, stack = 0, [value]
    while stack and found <= most:
        item = stack.pop()
        found += 1
        if isinstance(item, str):
            found += len(item)
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple):
            if len(item) > most:
                return len(item)
            stack += item
        elif isinstance(item, Namespace):
            # It has no other way to its values, and its text has them.
            stack.append(object.__getattribute__(item, "_Namespace__attrs"))
    return found


def _indented_weight(value: object, width: int, most: float) -> int:
    """About how many characters a value has when it is written out, one line for each item."""
    found, stack = 0, [(value, 0)]
    while stack and found <= most:
        item, depth = stack.pop()
        found += 1 + width * depth + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, Mapping):
            found += sum(len(key) for key in item if isinstance(key, str))
            stack += [(one, depth + 1) for one in item.values()]
        elif isinstance(item, list | tuple):
            stack += [(one, depth + 1) for one in item]
    return found


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "**", "%", "//"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        # Without the optimizer: it computes constants when a template is compiled, where no limit is known.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_written,
            extensions=[LoopControlExtension, _GenerationExtension],
        )

        def raise_exception(message: str) -> NoReturn:
            raise TemplateRefusal(message)

        def strftime_now(pattern: str) -> str:
            if len(pattern) > _MAX_WIDTH or _WIDE_DATE.search(pattern):
                raise LimitExceeded("uses strftime_now with a wide field")
            return now().strftime(pattern)

        self.filters = {name: _limited(name, FILTERS[name]) for name in _FILTERS}
        self.filters["tojson"] = _tojson
        namespace, numbers = self.globals["namespace"], self.globals["range"]
        self.globals = {
            "namespace": namespace,
            "range": numbers,
            "dict": dict,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), None)
        return (allowed is None or attr in allowed) and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:
        limits = _limits_of(__context)
        method = getattr(__obj, "__wrapped__", __obj)  # `format` is wrapped
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_method(limits, owner, name, args, kwargs)
        found = limits.made(super().call(__context, __obj, *args, **kwargs))
        return limits.built(found) if __obj is dict or __obj is Namespace else found

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        limits = _limits_of(context)
        if operator == "**":
            raise LimitExceeded("uses **, which is not allowed")
        if operator == "%" and isinstance(left, str):
            _check_percent(limits, left, right)
        sizes = [_size(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        counts = [side for side in (left, right) if isinstance(side, int)]
        if operator == "+" and sizes:
            limits.check(sum(sizes))
        elif operator == "*" and sizes and counts:
            limits.check(sizes[0] * counts[0])
        return limits.made(super().call_binop(context, operator, left, right))


class LimitInserter(NodeTransformer):
    """Inserts what Jinja's sandbox does not intercept: steps of loops and macros, `~`, slices and new containers."""

    def visit_Name(self, node: nodes.Name) -> nodes.Name:
        if node.name in LIMIT_NAMES:  # it could replace them
            raise TemplateAssertionError(f"the name {node.name} is reserved", node.lineno)
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, self._step(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        if node.name in LIMIT_NAMES:
            raise TemplateAssertionError(f"the name {node.name} is reserved", node.lineno)
        self.generic_visit(node)
        node.body.insert(0, self._step(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call(_JOIN, *node.nodes, at=node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._call(_MADE, node, at=node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._built(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._built(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._built(node) if node.ctx == "load" else node

    def _built(self, node: nodes.Expr) -> nodes.Node:
        is_constant = all(isinstance(one, nodes.Const | nodes.Pair) for one in node.iter_child_nodes())
        return node if is_constant and not isinstance(node, nodes.Dict) else self._call(_BUILT, node, at=node)

    @classmethod
    def _step(cls, node: nodes.Node) -> nodes.Node:
        return nodes.ExprStmt(cls._call(_STEP, at=node), lineno=node.lineno)

    @staticmethod
    def _call(name: str, *arguments: nodes.Node, at: nodes.Node) -> nodes.Call:
        function = nodes.Name(name, "load", lineno=at.lineno)
        return nodes.Call(function, list(arguments), [], None, None, lineno=at.lineno)


class _GenerationExtension(Extension):
    """{% generation %} marks the text to train on; for serving it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def limit_names(limits: Limits) -> dict[str, object]:
    """The names that LimitInserter uses."""
    return {_LIMITS: limits, _STEP: limits.step, _JOIN: limits.join, _MADE: limits.made, _BUILT: limits.built}


def _limits_of(context: Context) -> Limits:
    limits = context.parent[_LIMITS]
    assert isinstance(limits, Limits), "given to every rendering"
    return limits


@pass_context
def _written(context: Context, value: object) -> object:
    """What {{ value }} writes."""
    return value if isinstance(value, str) else _limits_of(context).text(value)


def _limited(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """A filter whose result is counted, and whose arguments are checked before it runs."""
    kind = getattr(function, "jinja_pass_arg", None)
    given = None if kind is None else kind.name

    @pass_context
    def checked(context: Context, value: object = "", *args: object, **options: object) -> object:
        limits = _limits_of(context)
        value = _check_filter(limits, name, value, args, options)
        first = {
            None: (),
            "context": (context,),
            "environment": (context.environment,),
            "eval_context": (context.eval_ctx,),
        }
        return limits.made(function(*first[given], value, *args, **options))

    return checked


def _check_filter(limits: Limits, name: str, value: Any, args: Sequence[Any], options: Mapping[str, object]) -> object:
    """The value for the filter."""

    def argument(index: int, named: str, default: object = None) -> Any:
        return args[index] if index < len(args) else options.get(named, default)

    wide = argument(0, {"indent": "width", "round": "precision"}.get(name, ""))
    if name in ("indent", "round") and isinstance(wide, int) and abs(wide) > _MAX_WIDTH:
        raise LimitExceeded(f"uses {name} with {wide}")
    if name in _TEXT_FILTERS and not isinstance(value, str):
        value = limits.text(value) if value is not None else value
    if name == "indent":
        width = argument(0, "width", 4)
        limits.check(len(value) + (len(value.splitlines()) + 1) * (width if isinstance(width, int) else len(width)))
    elif name == "int" and isinstance(value, str) and len(value) > _MAX_WIDTH:
        raise LimitExceeded("uses int with a long text")
    elif name == "replace":
        _check_replace(limits, str(value), str(argument(0, "old", "")), str(argument(1, "new", "")))
    elif name == "format":
        _check_percent(limits, str(value), [*args, *options.values()])
    elif name in ("e", "escape", "urlencode", "string"):
        limits.check((12 if name == "urlencode" else 5 if name != "string" else 1) * limits.weight(value))
    elif name == "join":
        value = value if isinstance(value, str) else list(value)
        limits.check(limits.weight(value) + len(value) * len(limits.text(argument(0, "d", ""))))
    elif name in ("list", "sort", "unique", "reverse", "map") and isinstance(value, str):
        limits.check(_ITEM_CHARACTERS * len(value))
    return value


def _check_method(limits: Limits, text: str, name: str, args: Sequence[object], options: Mapping[str, object]) -> None:
    given = [*args, *options.values()]
    if name == "replace" and len(given) > 1:
        _check_replace(limits, text, str(given[0]), str(given[1]))
    elif name == "join" and given and isinstance(given[0], list | tuple):
        limits.check(limits.weight(given[0]) + len(text) * len(given[0]))
    elif name == "join" and given and isinstance(given[0], str):
        limits.check(len(given[0]) * (1 + len(text)))
    elif name == "join":
        raise LimitExceeded("uses the method join on what is not a list")
    elif name in ("split", "rsplit", "splitlines"):
        separator = given[0] if given and isinstance(given[0], str) else ""
        num_parts = text.count(separator) if separator else len(text) // 2
        limits.check(_ITEM_CHARACTERS * num_parts)
    elif name == "format":
        _check_format(limits, text, given)


def _check_replace(limits: Limits, text: str, old: str = "", new: str = "") -> None:
    num_found = text.count(old) if old else len(text) + 1
    limits.check(len(text) + num_found * (len(new) - len(old)))


def _check_percent(limits: Limits, text: str, values: object) -> None:
    """Reads the fields as Python does: %(key)-10.3f, where a key may have parentheses of its own."""
    length, value_length, at = len(text), limits.weight(values) + _MAX_WIDTH, text.find("%")
    while at >= 0:
        at = _end_of_key(text, at + 1)
        field = _PERCENT_FIELD.match(text, at)
        assert field is not None, "all of its parts may be empty"
        widths = [width for width in field.groups() if width]
        _check_widths(widths, "%, which is not allowed")
        at = field.end()
        length += sum(map(int, widths)) + value_length * (_REPR if text[at : at + 1] in ("r", "a") else 1)
        at = text.find("%", at + 1)
    limits.check(length)


def _end_of_key(text: str, at: int) -> int:
    """Where the key of a % field ends that may begin here."""
    depth = 0
    while text[at : at + 1] == "(" or depth:
        if at >= len(text):  # Python refuses it
            return at
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
        if not depth:
            break
    return at


def _check_format(limits: Limits, text: str, values: object) -> None:
    length, value_length = len(text), limits.weight(values) + _MAX_WIDTH
    with suppress(ValueError):  # then `format` fails too
        for _, _, spec, conversion in Formatter().parse(text):
            if spec is None:
                continue
            widths = ["*"] if "{" in spec else _NUMBER.findall(spec)
            _check_widths(widths, "format")
            length += sum(map(int, widths)) + value_length * (_REPR if conversion in ("r", "a") else 1)
    limits.check(length)


def _check_widths(widths: Sequence[str], what: str) -> None:
    if any(width == "*" or len(width) > 9 or int(width) > _MAX_WIDTH for width in widths):
        raise LimitExceeded(f"uses {what} with a wide field")


def _size(value: str | Sequence[object]) -> int:
    return len(value) if isinstance(value, str) else _ITEM_CHARACTERS * len(value)


@pass_context
def _tojson(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes <, > and & for web pages, which would give the model other tokens.
    limits = _limits_of(context)
    width = indent if isinstance(indent, int) else len(indent or "")
    between: tuple[str, str] | None = None
    if separators is not None:
        item, key = separators
        between = item, key
    if width > 16 or (between is not None and max(map(len, between)) > 16):
        raise LimitExceeded(f"uses tojson with indent or separators of {width} characters")
    limits.built(value)
    if indent is not None:
        limits.check(_indented_weight(value, width, limits.max_characters))
    found = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=between, sort_keys=sort_keys)
    limits.made(found)
    return found
