"""How threads share a step: phases of independent items, drawn by whoever is free.

A phase is over when all its items are done, not when all threads have come by: a thread that the system has put aside
holds up the others only if it holds an item. So the order of phases is kept, and who did what never shows in a result.

`work` is int64 [phases, 16], zeroed before a step: the next item at 0, the finished ones at 8, a cache line apart.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onward.kernels.cpu.jit import device, inlined
from onward.kernels.cpu.vectors import I32, element_pointer

WORDS_PER_PHASE = 16
_SPINS_BEFORE_YIELD = 4000


@intrinsic
def _fetch_add(typing_context, work, index, amount):
    def emit(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return types.int64(work, types.intp, types.int64), emit


@intrinsic
def _load_acquire(typing_context, work, index):
    def emit(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.load_atomic(pointer, ordering="acquire", align=8)

    return types.int64(work, types.intp), emit


@intrinsic
def _pause(typing_context):
    """Tells the core that this is a wait loop."""

    def emit(context, builder, sig, args):
        if _is_x86(builder):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _yield_core(typing_context):
    """Lets another process run, if one waits for this core."""

    def emit(context, builder, sig, args):
        _call(builder, "sched_yield", I32)
        return context.get_dummy_value()

    return types.void(), emit


def _is_x86(builder: ir.IRBuilder) -> bool:
    return builder.module.triple.startswith(("x86_64", "i686"))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type) -> ir.Value:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, []), name)
    return builder.call(function, [])


@inlined
def draw(work, phase, count):
    """The first of the next `count` items. It may lie beyond the last item: then there is nothing left to do."""
    return _fetch_add(work, phase * WORDS_PER_PHASE, count)


@inlined
def finish(work, phase, count):
    """What these items wrote is visible to all who find the phase complete."""
    _fetch_add(work, phase * WORDS_PER_PHASE + 8, count)


@device
def await_all(work, phase, total):
    """Returns when all `total` items of the phase are done, by whomever."""
    spins = 0
    while _load_acquire(work, phase * WORDS_PER_PHASE + 8) < total:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            _pause()
        else:
            _yield_core()
