"""A Jinja2 environment in which a template from an unknown file can neither run code, nor hang, nor exhaust memory.

Jinja's immutable sandbox keeps templates away from Python's internals. What it does not bound is time and memory:
`{% for i in range(99999) %}` nested three times, `'a' * 10**10`, `'x'|center(10**10)`. Here every step of a template
passes a `Budget` (`budget.py`):

* the syntax tree is rewritten so that loops, literals, comparisons, slices, `~` and constant text go through guards;
* operators, calls, filters, tests and printed values go through Jinja's own hooks;
* before something could make a large value, its size is estimated (`estimates.py`); every value made is weighed as a
  tree (`Budget.made`), so that no later step (comparing, hashing, printing) has more than a bounded amount to do;
* filters, methods and functions are lists of what is allowed.

Rendering is synchronous and single-threaded; the budget of the running template is a context variable, so one
environment serves all threads.
"""

# ruff: noqa: N802, N815 (visit_Name is how Jinja names visitors)

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinMethodType, MethodType
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

from qkv.text.prompt.budget import STEP, running
from qkv.text.prompt.estimates import expect_filter, expect_format, expect_method, expect_percent_format, own_arguments


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHARED_FILTERS = _names(
    """abs attr batch capitalize center count d default dictsort e escape first float format groupby indent int items
    join last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort
    string sum title trim truncate unique upper"""
)
CONSTANT_TIME_FILTERS = _names("count d default first last length")
STR_METHODS = _names(
    """capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper zfill"""
)
OTHER_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"count", "index"}),
    LoopContext: frozenset({"cycle", "changed"}),
    Cycler: frozenset({"next", "reset"}),
}


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
        budget = running.get()
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    budget.expect(budget.weigh(sequence, printed=False) * max(count, 0))
        elif operator == "%" and isinstance(left, str):
            expect_percent_format(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.expect_integer(left.bit_length() * right)
        return budget.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def within_budget(*args: Any, **kwargs: Any) -> str:
            expect_format(running.get(), value.__self__, args, kwargs)
            return formatted(*args, **kwargs)

        within_budget.__self__ = value.__self__  # type: ignore[attr-defined]
        within_budget.__name__ = "format"
        return within_budget

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = running.get()
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", type(function).__name__)
        if isinstance(owner, str) and name in STR_METHODS:
            budget.weigh([owner, *args, *own_arguments(kwargs).values()])
            expect_method(budget, owner, name, args, kwargs)
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
    budget = running.get()
    budget.weigh(value)
    return budget.made(value if isinstance(value, str) else str(value))


@pass_context
def _iterate(context: Context, values: Any) -> Any:
    return running.get().iterate(values)


@pass_context
def _compared(context: Context, value: Any) -> Any:
    running.get().weigh(value, printed=False)
    return value


@pass_context
def _sliced(context: Context, value: Any) -> Any:
    if isinstance(value, (str, list, tuple, range)):
        running.get().step(STEP + len(value) // 2)
    return value


@pass_context
def _made(context: Context, value: Any) -> Any:
    return running.get().made(value)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    budget = running.get()
    budget.weigh(values)
    made: str = budget.made("".join(map(str, values)))
    return made


def _guard_test(name: str, function: Any) -> Callable[..., Any]:
    def guarded(value: Any, *args: Any) -> Any:
        if args or name in {"lower", "upper"}:
            running.get().weigh([value, *args], printed=False)
        return function(value, *args)

    return guarded


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes = _PassArg.from_obj(function)

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = running.get()
        budget.step()
        if name not in CONSTANT_TIME_FILTERS:
            budget.weigh([value, *args, *kwargs.values()])
            expect_filter(budget, name, value, args, kwargs)
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
