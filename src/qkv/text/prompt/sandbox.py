"""A Jinja2 environment in which a template from an unknown file can neither run code, nor hang, nor exhaust memory.

Jinja's immutable sandbox keeps templates away from Python's internals. What it does not bound is time and memory:
`{% for i in range(99999) %}` nested three times, `'a' * 10**10`, `'x'|center(10**10)`. Here every step of a template
passes a `Budget` (`budget.py`):

* the syntax tree is rewritten so that loops, literals, comparisons, slices, `~` and constant text go through guards;
* operators, calls, filters, tests and printed values go through Jinja's own hooks;
* before something could make a large value, its size is estimated; every value made, and every argument, is weighed as
  a tree, so that no later step (comparing, hashing, printing) has more than a bounded amount to do;
* filters, methods and functions are lists of what is allowed.

Rendering is synchronous and single-threaded; the budget of the running template is a context variable, so one
environment serves all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
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

from qkv.text.prompt.budget import expected_size, running


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILTER_NAMES = _names(
    """abs attr batch capitalize center count d default dictsort e escape first float format groupby indent int items
    join last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort
    string sum title trim truncate unique upper"""
)
CONSTANT_TIME_FILTERS = _names("count d default first last length")
STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"encode", "maketrans", "translate"}
OWNERS = (dict, list, tuple, range, LoopContext, Cycler)
"""Besides strings, types whose methods may be called. Those that would change a value are refused by Jinja."""
GUARDS = ("iterate", "compared", "made", "cut", "joined")
"""Methods of `Budget` that the syntax tree is made to call."""
CALLED = (Macro, LoopContext, Joiner, BlockReference, Undefined)
"""Types of what may be called itself, beside the globals."""
_COMPILERS_ARGUMENTS = _names("_loop_vars _block_vars")


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's name and type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Rewriter(NodeTransformer):
    """Puts the guards into a template's syntax tree."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _guarded("iterate", node.iter)
            case nodes.Compare():
                node.expr = _guarded("compared", node.expr)
                for operand in node.ops:
                    operand.expr = _guarded("compared", operand.expr)
            case nodes.TemplateData():  # constants pass `finalize`, template data would not
                return nodes.Const(node.data, lineno=node.lineno)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return _guarded("made", node)
            case nodes.Getitem(arg=nodes.Slice()):
                return _guarded("cut", node)
            case nodes.Concat():
                return _guarded("joined", nodes.List(node.nodes, lineno=node.lineno))
            case nodes.NSRef():
                _check_attribute(node.attr)
            case nodes.Include() | nodes.Import() | nodes.FromImport() | nodes.Extends() | nodes.EvalContextModifier():
                raise SecurityError(
                    f"{type(node).__name__.lower()} (line {node.lineno}) has no place in a chat template"
                )
        return node


def _guarded(name: str, node: nodes.Node) -> nodes.Filter:
    """The node as a guard's argument. The guard's name has a space: no template can write it."""
    return nodes.Filter(cast(nodes.Expr, node), f"guard {name}", [], [], None, None, lineno=node.lineno)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates: Hugging Face's whitespace rules and extensions, everything within a budget.

    filters, functions: what templates may use besides Jinja's own, by name. A filter's arguments and result are
    weighed; its own work must be bounded by them.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=_printed,
            optimized=False,
            cache_size=0,
        )
        allowed = {name: FILTERS[name] for name in FILTER_NAMES} | dict(filters)
        self.filters = {name: _guard_filter(name, function) for name, function in allowed.items()}
        self.filters |= {f"guard {name}": partial(_on_budget, name) for name in GUARDS}
        self.tests = {name: _guard_test(test) for name, test in TESTS.items() if name not in {"filter", "test"}}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": Namespace}
        self.globals |= {"cycler": Cycler, "joiner": Joiner, **functions}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Rewriter().visit(source), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = running.get()
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    budget.expect(budget.weigh(sequence, printed=False) * max(count, 0))
        elif operator == "%" and isinstance(left, str):
            budget.expect(expected_size("%", left, (), {}, budget.weigh(right)))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.expect_integer(left.bit_length() * right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = running.get()
        own = {name: value for name, value in kwargs.items() if name not in _COMPILERS_ARGUMENTS}
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # Jinja wraps `str.format`
        name = getattr(function, "__name__", type(function).__name__)
        size = budget.weigh([owner, *args, *own.values()], printed=isinstance(owner, str))
        if isinstance(owner, str) and name in STR_METHODS:
            value, given = (args[0], (owner,)) if name == "join" and args else (owner, args)
            budget.expect(expected_size(name, value, given, own, size))
        elif not isinstance(function, CALLED) and type(owner) not in OWNERS and function not in self.globals.values():
            raise SecurityError(f"{name} cannot be called in a chat template")
        elif function is Namespace:
            for attribute in dict(*args, **own):
                _check_attribute(attribute)
        return budget.made(super().call(context, function, *args, **kwargs))


def _check_attribute(name: object) -> None:
    """Keep underscore names out of namespaces, as Hugging Face does."""
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute named {str(name)[:40]!r}")


@pass_context  # so that no constant is printed while the template is compiled, without a budget
def _printed(context: Context, value: Any) -> Any:
    """Every printed value comes here before it becomes text."""
    return running.get().printed(value)


def _on_budget(method: str, value: Any) -> Any:
    """A guard of the syntax tree: the budget's method of that name, with the value."""
    return getattr(running.get(), method)(value)


def _guard_test(function: Any) -> Callable[..., Any]:
    def guarded(*args: Any) -> Any:
        running.get().step()
        return function(*args)

    return guarded


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    at = 0 if _PassArg.from_obj(function) is None else 1  # Jinja passes the context or the like before the value

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = running.get()
        value, given = args[at], args[at + 1 :]
        if name not in CONSTANT_TIME_FILTERS:
            size = budget.weigh([value, *given, *kwargs.values()])
            budget.expect(expected_size("%" if name == "format" else name, value, given, kwargs, size))
            _check_numbers(name, given, kwargs)
        return budget.made(function(*args, **kwargs))

    return guarded


def _check_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name == "round" and abs(args[0] if args else kwargs.get("precision", 0)) > 300:
        raise SecurityError("round takes at most 300 digits")
    if name == "sum" and not isinstance(args[1] if len(args) > 1 else kwargs.get("start", 0), (int, float)):
        raise SecurityError("sum adds numbers only")
