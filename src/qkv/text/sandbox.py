"""A Jinja2 environment in which a template from an unknown file can neither run code, nor hang, nor exhaust memory.

Jinja's immutable sandbox keeps templates away from Python's internals. What it does not bound is time and memory:
`{% for i in range(99999) %}` nested three times, `'a' * 10**10`, `'x'|center(10**10)`. Here every step of a template
passes a `Budget`:

* the syntax tree is rewritten so that loops, literals, comparisons, slices, `~` and constant text go through guards;
* operators, calls, filters, tests and printed values go through Jinja's own hooks;
* before something could make a large value, its size is estimated (`Budget.expect`); every value made is weighed as a
  tree (`Budget.made`), so that no later step (comparing, hashing, printing) has more than a bounded amount to do;
* filters, methods and functions are lists of what is allowed.

Rendering is synchronous and single-threaded; the budget of the running template is a context variable, so one
environment serves all threads.
"""

# ruff: noqa: N802, N815 (visit_Name is how Jinja names visitors)

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, cast

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace, _PassArg
from jinja2.visitor import NodeTransformer

CPU_SECONDS = 1.0
"""Processor time a rendering may take; a template of real use takes milliseconds."""
VALUE_BYTES = 4 << 20
TOTAL_BYTES = 128 << 20
INTEGER_BITS = 4096
STEP = 64
"""What a step costs, in the unit of a value's bytes."""

SHARED_FILTERS = (
    *("abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max"),
    *("min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort"),
    *("string", "sum", "title", "trim", "truncate", "unique", "upper"),
)
CONSTANT_TIME_FILTERS = frozenset({"count", "d", "default", "first", "last", "length"})
STR_METHODS = frozenset(
    {
        *(
            "capitalize",
            "casefold",
            "center",
            "count",
            "endswith",
            "expandtabs",
            "find",
            "format",
            "format_map",
            "index",
        ),
        *(
            "isalnum",
            "isalpha",
            "isascii",
            "isdecimal",
            "isdigit",
            "isidentifier",
            "islower",
            "isnumeric",
            "isprintable",
        ),
        *("isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
        *(
            "removesuffix",
            "replace",
            "rfind",
            "rindex",
            "rjust",
            "rpartition",
            "rsplit",
            "rstrip",
            "split",
            "splitlines",
        ),
        *("startswith", "strip", "swapcase", "title", "upper", "zfill"),
    }
)
OTHER_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"count", "index"}),
    LoopContext: frozenset({"cycle", "changed"}),
    Cycler: frozenset({"next", "reset"}),
}


class Budget:
    """What one rendering may still spend. Limits grow with the size of the conversation, so long ones render too."""

    def __init__(self, given: object) -> None:
        size = weigh(given, None)
        self.value_limit = VALUE_BYTES + 8 * size
        self._left = TOTAL_BYTES + 64 * size
        self._deadline = time.thread_time() + CPU_SECONDS
        self._unchecked = 0

    def step(self, cost: int = STEP) -> None:
        """Count work done; now and then look at the clock."""
        self._unchecked += cost
        if self._unchecked > 50_000:
            self._unchecked = 0
            if time.thread_time() > self._deadline:
                raise SecurityError(f"the template needs more than {CPU_SECONDS:g} s of processor time")

    def expect(self, size: int | float) -> None:
        """Refuse before making a value of about `size` bytes, if that is too large."""
        if size > self.value_limit:
            raise SecurityError(f"the template makes a value of more than {self.value_limit} bytes")

    def weigh(self, value: object, *, printed: bool = True) -> int:
        """The tree size of `value`, refused above the limit. `printed`: only data, nothing with a life of its own."""
        weight = weigh(value, self, printed=printed)
        self.step(STEP + weight // 16)
        return weight

    def made(self, value: Any, *, printed: bool = False) -> Any:
        """Account for a value the template made; views and generators become lists."""
        if isinstance(value, (GeneratorType, type({}.keys()), type({}.values()), type({}.items()), reversed, map, zip)):
            value = list(self.iterate(value))
        self.weigh(value, printed=printed)
        # Children that are containers existed before (messages); strings may be new (split).
        self._left -= STEP + len(value) if isinstance(value, str) else STEP
        if isinstance(value, (list, tuple)):
            self._left -= sum(8 + (STEP + len(child) if isinstance(child, str) else 0) for child in value)
        elif isinstance(value, dict):
            self._left -= 2 * STEP * len(value)
        if self._left < 0:
            raise SecurityError("the template makes more text than a conversation of this size can need")
        return value

    def iterate(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, one step each; what a generator makes is accounted for as a whole by `made`."""
        total = 0
        for value in values:
            total += STEP + (len(value) if isinstance(value, str) else 0)
            self.step()
            if not isinstance(values, (list, tuple, dict, str, range)):
                self.expect(total)
            yield value


def weigh(value: object, budget: Budget | None, *, printed: bool = True) -> int:
    """About the bytes `value` takes as a tree (what is shared counts each time), stopping at the budget's limit."""
    total = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += STEP + len(item)
        elif isinstance(item, (list, tuple)):
            total += STEP + 8 * len(item)
        elif isinstance(item, dict):
            total += STEP + 2 * STEP * len(item)
        elif isinstance(item, range):
            total += STEP + 40 * len(item)
        elif isinstance(item, int) and item.bit_length() > INTEGER_BITS:
            raise SecurityError(f"the template makes an integer of more than {INTEGER_BITS} bits")
        elif item is None or isinstance(item, (int, float, Undefined)):
            total += STEP
        elif printed:
            raise SecurityError(f"a {type(item).__name__} cannot be printed or passed to a filter")
        else:
            total += STEP
        if budget is not None:
            budget.expect(total)
        if isinstance(item, (list, tuple)):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
    return total


_running: ContextVar[Budget] = ContextVar("budget")


def run_within(budget: Budget, render: Callable[[], str]) -> str:
    """Call `render` with `budget` as the one that every guard of this environment charges."""
    token = _running.set(budget)
    try:
        return render()
    finally:
        _running.reset(token)


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's name and type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Rewriter(NodeTransformer):
    """Puts the guards into a template's syntax tree. Their names have a space: no template can write them."""

    def _guarded(self, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(cast(nodes.Expr, node), f"guard {name}", [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._guarded("iterate", node.iter)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # constants pass `finalize`, template data would not

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._guarded("made", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._guarded("made", node) if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._guarded("compared", node.expr)
        for operand in node.ops:
            operand.expr = self._guarded("compared", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._guarded("sliced", node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._guarded("concat", nodes.List(node.nodes, lineno=node.lineno))

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise SecurityError(f"{type(node).__name__.lower()} (line {node.lineno}) has no place in a chat template")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates: Hugging Face's whitespace rules and extensions, everything within a budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=_printed,
            optimized=False,
            cache_size=0,
        )
        self.filters = {name: _guard_filter(name, FILTERS[name]) for name in SHARED_FILTERS}
        self.filters |= {
            "guard iterate": _iterate,
            "guard made": _made,
            "guard concat": _concat,
            "guard compared": _compared,
            "guard sliced": _sliced,
        }
        self.tests = {name: _guard_test(name, test) for name, test in TESTS.items() if name not in {"filter", "test"}}
        self._functions: set[int] = set()
        numbers = self.globals["range"]
        self.globals.clear()
        for name, function in {
            "range": numbers, "dict": _dict, "namespace": _Namespace, "cycler": Cycler, "joiner": Joiner,
        }.items():  # fmt: skip
            self.add_function(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Let templates use a filter; its arguments and result are weighed, its own work must be bounded by them."""
        self.filters[name] = _guard_filter(name, function)

    def add_function(self, name: str, function: Any) -> None:
        """Let templates call a function by this name."""
        self.globals[name] = function
        self._functions.add(id(function))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Rewriter().visit(source), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _running.get()
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    budget.expect(budget.weigh(sequence, printed=False) * max(count, 0))
        elif operator == "%" and isinstance(left, str):
            _expect_percent_format(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > INTEGER_BITS:
                raise SecurityError(f"the template makes an integer of more than {INTEGER_BITS} bits")
        return budget.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def within_budget(*args: Any, **kwargs: Any) -> str:
            _expect_format(_running.get(), value.__self__, args, kwargs)
            return formatted(*args, **kwargs)

        within_budget.__self__ = value.__self__  # type: ignore[attr-defined]
        within_budget.__name__ = "format"
        return within_budget

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _running.get()
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", type(function).__name__)
        if isinstance(owner, str) and name in STR_METHODS:
            budget.weigh([owner, *args, *_shown(kwargs).values()])
            _expect_method(budget, owner, name, args, kwargs)
        elif not self._may_call(function, owner, name):
            raise SecurityError(f"{name} cannot be called in a chat template")
        elif isinstance(owner, (list, tuple, range, LoopContext)):
            budget.weigh([owner, *args], printed=False)  # these compare their arguments
        return budget.made(super().call(context, function, *args, **kwargs))

    def _may_call(self, function: Any, owner: Any, name: str) -> bool:
        if id(function) in self._functions:
            return True
        if isinstance(function, (Macro, LoopContext, Joiner, BlockReference, Undefined)):
            return True
        if isinstance(function, (BuiltinMethodType, MethodType)):
            return any(type(owner) is kind and name in names for kind, names in OTHER_METHODS.items())
        return False


def _shown(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The template's own keyword arguments, without those that Jinja's compiler passes along."""
    return {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}


class _Namespace(Namespace):
    """`namespace()`: a place for variables. Underscore names are kept out, as Hugging Face does."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute named {str(name)[:40]!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@pass_context
def _printed(context: Context, value: Any) -> Any:
    """Every printed value comes here before it becomes text."""
    budget = _running.get()
    budget.weigh(value)
    return budget.made(value if isinstance(value, str) else str(value))


@pass_context
def _iterate(context: Context, values: Any) -> Any:
    return _running.get().iterate(values)


@pass_context
def _compared(context: Context, value: Any) -> Any:
    _running.get().weigh(value, printed=False)
    return value


@pass_context
def _sliced(context: Context, value: Any) -> Any:
    if isinstance(value, (str, list, tuple, range)):
        _running.get().step(STEP + len(value) // 2)
    return value


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _running.get().made(value)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    budget = _running.get()
    budget.weigh(values)
    made: str = budget.made("".join(map(str, values)))
    return made


def _guard_test(name: str, function: Any) -> Callable[..., Any]:
    def guarded(value: Any, *args: Any) -> Any:
        if args or name in {"lower", "upper"}:
            _running.get().weigh([value, *args], printed=False)
        return function(value, *args)

    return guarded


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes = _PassArg.from_obj(function)

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _running.get()
        budget.step()
        if name not in CONSTANT_TIME_FILTERS:
            budget.weigh([value, *args, *kwargs.values()])
            _expect_filter(budget, name, value, args, kwargs)
        if passes is _PassArg.context:
            args = (context, value, *args)
        elif passes is _PassArg.eval_context:
            args = (context.eval_ctx, value, *args)
        elif passes is _PassArg.environment:
            args = (context.environment, value, *args)
        else:
            args = (value, *args)
        return budget.made(function(*args, **kwargs))

    return guarded


def _number(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str, default: Any) -> Any:
    """The argument at position `at` or of that name, if it is a number."""
    value = args[at] if len(args) > at else kwargs.get(name, default)
    return value if isinstance(value, (int, float)) else 0


def _expect_filter(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(value, str) and name in {"list", "sort", "unique", "reverse", "batch", "slice", "map", "groupby"}:
        budget.expect(STEP * len(value))  # becomes a list of characters
    if name == "center":
        budget.expect(_number(args, kwargs, 0, "width", 80))
    elif name == "indent":
        width = args[0] if args else kwargs.get("width", 4)
        size = len(width) if isinstance(width, str) else _number((width,), {}, 0, "", 0)
        budget.expect(len(str(value)) + size * (str(value).count("\n") + 1))
    elif name in {"batch", "slice"}:
        size = _number(args, kwargs, 0, "linecount" if name == "batch" else "slices", 0)
        fill = args[1] if len(args) > 1 else kwargs.get("fill_with")
        budget.expect(size * (STEP + budget.weigh(fill)))
    elif name == "replace":
        _expect_replace(budget, str(value), *(str(item) for item in (*args, *kwargs.values())))
    elif name == "join":
        items = list(value) if isinstance(value, (list, tuple, dict, str)) else []
        separator = args[0] if args else kwargs.get("d", "")
        budget.expect(budget.weigh(value) + len(items) * len(str(separator)))
    elif name == "format":
        _expect_percent_format(budget, str(value), kwargs or args)
    elif name == "round" and abs(_number(args, kwargs, 0, "precision", 0)) > 300:
        raise SecurityError("round takes at most 300 digits")
    elif name == "sum" and not isinstance(args[1] if len(args) > 1 else kwargs.get("start", 0), (int, float)):
        raise SecurityError("sum adds numbers only")


def _expect_method(budget: Budget, owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    first = args[0] if args else None
    if name in {"center", "ljust", "rjust", "zfill"}:
        budget.expect(_number(args, kwargs, 0, "width", 0))
    elif name == "expandtabs":
        budget.expect(len(owner) + owner.count("\t") * _number(args, kwargs, 0, "tabsize", 8))
    elif name == "replace":
        _expect_replace(budget, owner, *(str(item) for item in args))
    elif name == "join" and isinstance(first, (list, tuple, dict, str)):
        budget.expect(budget.weigh(first) + len(first) * len(owner))
    elif name in {"split", "rsplit"} and isinstance(first, str) and first:
        budget.expect(len(owner) + STEP * (owner.count(first) + 1))
    elif name in {"split", "rsplit"}:
        budget.expect(len(owner) + STEP * sum(map(str.isspace, owner)))
    elif name == "splitlines":
        budget.expect(len(owner) + STEP * sum(char in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029" for char in owner))


def _expect_replace(budget: Budget, text: str, old: str = "", new: str = "", *rest: str) -> None:
    budget.expect(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


def _expect_percent_format(budget: Budget, text: str, values: Any) -> None:
    size, largest = len(text), budget.weigh(values)
    for width, precision in _PERCENT.findall(text):
        if "*" in (width, precision):
            raise SecurityError("a width of * has no place in a chat template")
        size += largest + _width(width) + _width(precision)
    budget.expect(size)


def _expect_format(budget: Budget, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    size, largest = len(text), budget.weigh([*args, *_shown(kwargs).values()])
    for _, field, spec, _ in string.Formatter().parse(text):
        if field is None:
            continue
        if spec and "{" in spec:
            raise SecurityError("a format inside a format has no place in a chat template")
        size += largest + sum(_width(digits) for digits in re.findall(r"\d+", spec or ""))
    budget.expect(size)


def _width(digits: str) -> int:
    return int(digits or 0) if len(digits) < 12 else 10**12
