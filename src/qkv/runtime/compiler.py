# mypy: disable-error-code="no-untyped-call"
"""How a kernel and the kernels it calls become one program.

Numba gives each function its own machine code and a wrapper for Python, even if only other functions call it, and puts
its already optimized code into every caller, to be optimized there again, level after level. Here a function that a
kernel calls is only a *part*: its plain code goes to the caller, and LLVM optimizes a program as a whole, once. For
the decoder's step that is 2.5 times less work and one eighth of the bytes on the disk.

Parts are private to their program, and what is public has a name made of the kernel's content: programs that different
processes compiled can be loaded side by side without being taken for each other.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from numba import _dynfunc  # type: ignore[attr-defined]  # a C extension
from numba.core import compiler, typed_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_machinery import register_pass

from qkv.runtime import cache


class _ProgramLibrary(JITCodeLibrary):
    """A kernel that Python calls, with its parts."""

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if function.linkage == llvmlite.binding.Linkage.linkonce_odr:
                function.linkage = "internal"
        super()._optimize_final_module()


class _PartLibrary(JITCodeLibrary):
    """A kernel that kernels call: LLVM code as it is, with that of its own parts."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


def _name_by_content(state: Any) -> None:
    key = cache.key_of(state.func_id.func)
    if key is not None:
        state.func_id.unique_name += f"${key[:20]}"


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerProgram(typed_passes.NativeLowering):
    _name = "qkv_lower_program"

    def run_pass(self, state: Any) -> bool:
        _name_by_content(state)
        state.library = _ProgramLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        super().run_pass(state)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerPart(typed_passes.NativeLowering):
    _name = "qkv_lower_part"

    def run_pass(self, state: Any) -> bool:
        _name_by_content(state)
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        state.library.finalize()
        lowered = state["cr"]
        described = lowered.fndesc
        module, name = described.lookup_module(), described.qualname
        # Numba knows a compiled function by its Python function. This one has no machine code; nobody gets to see it.
        key = _dynfunc.make_function(module, name, "", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(key, described, [state.library])
        state["cr"] = lowered._replace(cfunc=key)
        cache.tell_compiled(name)
        return True


class _Compiler(compiler.Compiler):
    """Numba's own compiler with another last pass."""

    lowering: type

    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [
                (self.lowering if each is typed_passes.NativeLowering else each, text) for each, text in pipeline.passes
            ]
        return pipelines


class ProgramCompiler(_Compiler):
    """For kernels that Python calls."""

    lowering = _LowerProgram


class PartCompiler(_Compiler):
    """For kernels that kernels call."""

    lowering = _LowerPart
