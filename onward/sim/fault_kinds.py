"""The kinds of faults, and how each is brought about."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.sim.process import SimProcess
from onward.sim.scenario import SHAPES, FaultSpec, Shape

if TYPE_CHECKING:
    from onward.sim.simulation import Simulation


@dataclass(frozen=True, slots=True)
class FaultKind:
    help: str
    shapes: tuple[Shape, ...] = SHAPES
    is_client_fault: bool = False
    """Part of what clients do: it stands in a `SimRequest`, not among the faults."""


WITH_PEERS: tuple[Shape, ...] = ("pd", "cluster")
WITH_ROUTER: tuple[Shape, ...] = ("cluster",)
FAULT_KINDS: dict[str, FaultKind] = {
    "kill-worker": FaultKind("a worker is killed"),
    "kill-engine": FaultKind("an engine is killed, and its worker with it"),
    "kill-api": FaultKind("an api process is killed"),
    "kill-shelf": FaultKind("a shelf is killed, and what it kept is lost"),
    "kill-instance": FaultKind("a whole machine dies, and comes back later"),
    "kill-router": FaultKind("a router is killed, and comes back", WITH_ROUTER),
    "stop-worker": FaultKind("a worker hangs for a while"),
    "stop-engine": FaultKind("an engine hangs for a while"),
    "stop-api": FaultKind("an api process hangs for a while"),
    "stop-shelf": FaultKind("a shelf hangs for a while"),
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


def inject(world: "Simulation", fault: FaultSpec) -> None:
    """It begins now."""
    verb, _, role = fault.kind.partition("-")
    if verb == "kill":
        _kill(world, fault, role)
    elif verb == "stop":
        _stop(world, fault, role)
    elif fault.kind == "clock":
        _set_clock(world, fault)
    elif fault.kind == "drain":
        _drain(world, fault)
    else:
        _inject_wire_fault(world, fault)


def _kill(world: "Simulation", fault: FaultSpec, role: str) -> None:
    if role == "router":
        router = world.routers.get(fault.target)
        if router is not None and not router.process.is_dead:
            _record_injection(world, fault)
            router.kill()
            world.after(fault.duration_s, router.revive)
    elif role == "instance":
        instance = world.instances[fault.target]
        if not instance.lifetime.is_leaving:
            _record_injection(world, fault)
            instance.kill()
            world.after(fault.duration_s, instance.start_again)
    else:
        for process in world.instances[fault.target].processes(role)[:1]:
            _record_injection(world, fault)
            process.kill()


def _stop(world: "Simulation", fault: FaultSpec, role: str) -> None:
    for process in _target_processes(world, fault.target, role):
        if not process.is_stopped:
            _record_injection(world, fault)
            process.stop()
            world.after(fault.duration_s, process.resume)


def _target_processes(world: "Simulation", target: str, role: str) -> list[SimProcess]:
    if role == "router":
        router = world.routers.get(target)
        return [router.process] if router is not None and not router.process.is_dead else []
    found = world.instances[target].processes(role)
    return found if role == "instance" else found[:1]


def _set_clock(world: "Simulation", fault: FaultSpec) -> None:
    """By up to half a minute, either way: more than requests wait, and less than proofs of the cluster's key allow."""
    offset_s = (fault.rate - 0.5) * 60.0
    if fault.target in world.routers:
        world.routers[fault.target].set_clock(offset_s)
        world.after(fault.duration_s, lambda: world.routers[fault.target].set_clock(0.0))
    else:
        world.instances[fault.target].set_clock(offset_s)
        world.after(fault.duration_s, lambda: world.instances[fault.target].set_clock(0.0))
    _record_injection(world, fault)


def _drain(world: "Simulation", fault: FaultSpec) -> None:
    instance = world.instances[fault.target]
    if instance.lifetime.is_leaving:
        return
    _record_injection(world, fault)
    instance.shut_down()

    def revive() -> None:
        """The operator starts the next one when the old one is gone."""
        if instance.lifetime.supervisor.is_dead:
            instance.start_again()
        else:
            world.after(1.0, revive)

    world.after(fault.duration_s, revive)


def _inject_wire_fault(world: "Simulation", fault: FaultSpec) -> None:
    spell = world.active_faults.begin(fault.kind, fault.target, fault.rate)
    world.trace.note(f"{fault.kind} on {fault.target or 'all wires'} at {fault.rate:.2f} for {fault.duration_s:.2f} s")
    world.after(fault.duration_s, lambda: world.active_faults.end(spell))


def _record_injection(world: "Simulation", fault: FaultSpec) -> None:
    world.active_faults.trigger_counts[fault.kind] += 1
    world.trace.note(f"{fault.kind} {fault.target} for {fault.duration_s:.2f} s")
