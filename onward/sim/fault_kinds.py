"""The kinds of faults, and functions that inject them."""

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.sim.scenario import SHAPES, FaultSpec, Shape

if TYPE_CHECKING:
    from onward.sim.instance import SimInstance
    from onward.sim.nodes import RouterNode
    from onward.sim.simulation import Simulation


@dataclass(frozen=True, slots=True)
class FaultKind:
    help: str
    shapes: tuple[Shape, ...] = SHAPES
    is_client_fault: bool = False
    """Part of what clients do: it is set in a `SimRequest` and is not a `FaultSpec`."""


WITH_PEERS: tuple[Shape, ...] = ("pd", "cluster")
WITH_ROUTER: tuple[Shape, ...] = ("cluster",)
FAULT_KINDS: dict[str, FaultKind] = {
    "kill-worker": FaultKind("a worker is killed"),
    "crash-worker": FaultKind("a worker writes to wrong places in its KV memory, and dies of it"),
    "kill-standby": FaultKind("a standby worker is killed", ("engine", "cluster")),
    "kill-engine": FaultKind("an engine is killed, and its worker with it"),
    "kill-api": FaultKind("an api process is killed"),
    "kill-shelf": FaultKind("a stream store is killed, and what it kept is lost"),
    "kill-instance": FaultKind("a whole machine dies, and comes back later"),
    "kill-router": FaultKind("a router is killed, and comes back", WITH_ROUTER),
    "stop-worker": FaultKind("a worker hangs for a while"),
    "stop-engine": FaultKind("an engine hangs for a while"),
    "stop-api": FaultKind("an api process hangs for a while"),
    "stop-shelf": FaultKind("a stream store hangs for a while"),
    "stop-instance": FaultKind("a whole machine hangs for a while", WITH_ROUTER),
    "stop-router": FaultKind("a router hangs for a while", WITH_ROUTER),
    "lose": FaultKind("messages between processes or machines are lost"),
    "repeat": FaultKind("messages arrive twice"),
    "reorder": FaultKind("messages between machines overtake each other", WITH_PEERS),
    "delay": FaultKind("wires are slow"),
    "partition": FaultKind("two parts cannot reach each other, in one direction or both"),
    "cut": FaultKind("HTTP connections break in mid-stream"),
    "refuse": FaultKind("HTTP connections are refused"),
    "slow-kv": FaultKind("KV transfers crawl", WITH_PEERS),
    "break-kv": FaultKind("KV transfers break off", WITH_PEERS),
    "late-kv": FaultKind(
        "a prefill worker notices late that the worker it writes to is dead, which is killed", WITH_PEERS
    ),
    "clock": FaultKind("the wall clock of a machine or router is wrong, and is set right", WITH_ROUTER),
    "drain": FaultKind("an instance is drained, leaves and is replaced", WITH_ROUTER),
    "poison": FaultKind("a request that no worker survives", is_client_fault=True),
    "poison-engine": FaultKind("a request that no engine survives", ("engine",), is_client_fault=True),
    "doom": FaultKind("a request whose logits are no numbers", is_client_fault=True),
    "abort": FaultKind("a request is aborted by its label", is_client_fault=True),
    "leave": FaultKind("a client goes away", is_client_fault=True),
    "disconnect": FaultKind("a client's connection is lost, and it comes back", is_client_fault=True),
    "deadline": FaultKind("a request with a deadline that may pass", is_client_fault=True),
    "detach": FaultKind(
        "a client goes at once, and asks later for what was made in the background", is_client_fault=True
    ),
    "cancel": FaultKind("what is made in the background is cancelled", is_client_fault=True),
}


def kinds_of(shape: Shape) -> list[str]:
    return [name for name, kind in FAULT_KINDS.items() if shape in kind.shapes]


def inject(simulation: "Simulation", fault: FaultSpec) -> None:
    """Begins a fault now."""
    verb, _, role = fault.kind.partition("-")
    if fault.kind == "crash-worker":
        _crash_worker(simulation, fault)
    elif verb == "kill":
        _kill(simulation, fault, role)
    elif verb == "stop":
        _stop(simulation, fault, role)
    elif fault.kind == "clock":
        _set_clock(simulation, fault)
    elif fault.kind == "drain":
        _drain(simulation, fault)
    else:
        _inject_wire_fault(simulation, fault)


def _kill(simulation: "Simulation", fault: FaultSpec, role: str) -> None:
    if role in ("router", "instance"):
        machine = _machine(simulation, fault.target)
        if machine is not None and machine.is_up:
            _record_injection(simulation, fault)
            machine.kill()
            simulation.after(fault.duration_s, machine.start_again)
    else:
        for process in simulation.instances[fault.target].processes(role)[:1]:
            _record_injection(simulation, fault)
            process.kill()


def _crash_worker(simulation: "Simulation", fault: FaultSpec) -> None:
    worker = simulation.instances[fault.target].lifetime.worker
    if worker is not None and not worker.process.is_dead:
        _record_injection(simulation, fault)
        worker.damage_memory()
        worker.process.kill(return_code=-signal.SIGSEGV)


def _stop(simulation: "Simulation", fault: FaultSpec, role: str) -> None:
    machine = _machine(simulation, fault.target)
    found = [] if machine is None else machine.processes(role)
    for process in found if role == "instance" else found[:1]:
        if not process.is_stopped:
            _record_injection(simulation, fault)
            process.stop()
            simulation.after(fault.duration_s, process.resume)


def _set_clock(simulation: "Simulation", fault: FaultSpec) -> None:
    """Shifts a wall clock by up to half a minute, either way: more than requests wait, and less than cluster signatures
    allow."""
    machine = _machine(simulation, fault.target)
    assert machine is not None, f"{fault.target} has a clock"
    machine.set_clock((fault.rate - 0.5) * 60.0)
    simulation.after(fault.duration_s, lambda: machine.set_clock(0.0))
    _record_injection(simulation, fault)


def _machine(simulation: "Simulation", name: str) -> "RouterNode | SimInstance | None":
    """Returns a router or instance, or None for a router that a shrunk scenario no longer has."""
    return simulation.routers.get(name) or simulation.instances.get(name)


def _drain(simulation: "Simulation", fault: FaultSpec) -> None:
    instance = simulation.instances[fault.target]
    if instance.lifetime.is_leaving:
        return
    _record_injection(simulation, fault)
    instance.shut_down()

    def revive() -> None:
        """Starts the instance again when the old one is gone, as an operator would."""
        if instance.lifetime.supervisor.is_dead:
            instance.start_again()
        else:
            simulation.after(1.0, revive)

    simulation.after(fault.duration_s, revive)


def _inject_wire_fault(simulation: "Simulation", fault: FaultSpec) -> None:
    active_fault = simulation.active_faults.begin(fault.kind, fault.target, fault.rate)
    simulation.trace.note(
        f"{fault.kind} on {fault.target or 'all wires'} at {fault.rate:.2f} for {fault.duration_s:.2f} s"
    )
    simulation.after(fault.duration_s, lambda: simulation.active_faults.end(active_fault))


def _record_injection(simulation: "Simulation", fault: FaultSpec) -> None:
    simulation.active_faults.trigger_counts[fault.kind] += 1
    simulation.trace.note(f"{fault.kind} {fault.target} for {fault.duration_s:.2f} s")
