"""The kinds of faults, and how each is brought about."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.sim.process import Process
from onward.sim.scenario import SHAPES, Fault, Shape

if TYPE_CHECKING:
    from onward.sim.world import World


@dataclass(frozen=True, slots=True)
class Kind:
    help: str
    shapes: tuple[Shape, ...] = SHAPES
    is_of_clients: bool = False
    """Part of what clients do: it stands in an `Ask`, not among the faults."""


WITH_PEERS: tuple[Shape, ...] = ("pd", "cluster")
ROUTED: tuple[Shape, ...] = ("cluster",)
KINDS: dict[str, Kind] = {
    "kill-worker": Kind("a worker is killed"),
    "kill-engine": Kind("an engine is killed, and its worker with it"),
    "kill-api": Kind("an api process is killed"),
    "kill-shelf": Kind("a shelf is killed, and what it kept is lost"),
    "kill-instance": Kind("a whole machine dies, and comes back later"),
    "kill-router": Kind("a router is killed, and comes back", ROUTED),
    "stop-worker": Kind("a worker hangs for a while"),
    "stop-engine": Kind("an engine hangs for a while"),
    "stop-api": Kind("an api process hangs for a while"),
    "stop-shelf": Kind("a shelf hangs for a while"),
    "stop-instance": Kind("a whole machine hangs for a while", ROUTED),
    "stop-router": Kind("a router hangs for a while", ROUTED),
    "lose": Kind("messages between processes or machines are lost"),
    "repeat": Kind("messages arrive twice"),
    "reorder": Kind("messages between machines overtake each other", WITH_PEERS),
    "delay": Kind("wires are slow"),
    "partition": Kind("two parts cannot reach each other, in one direction or both"),
    "cut": Kind("HTTP connections break in mid-stream"),
    "refuse": Kind("HTTP connections are refused"),
    "slow-kv": Kind("KV transfers crawl", WITH_PEERS),
    "break-kv": Kind("KV transfers break off", WITH_PEERS),
    "clock": Kind("the wall clock of a machine or router is wrong, and is set right", ROUTED),
    "drain": Kind("an instance is drained, leaves and is replaced", ROUTED),
    "poison": Kind("a request that no worker survives", is_of_clients=True),
    "poison-engine": Kind("a request that no engine survives", ("engine",), is_of_clients=True),
    "doom": Kind("a request whose logits are no numbers", is_of_clients=True),
    "abort": Kind("a request is aborted by its label", is_of_clients=True),
    "leave": Kind("a client goes away", is_of_clients=True),
    "disconnect": Kind("a client's connection is lost, and it comes back", is_of_clients=True),
    "deadline": Kind("a request with a deadline that may pass", is_of_clients=True),
    "detach": Kind("a client goes at once, and asks later for what was made in the background", is_of_clients=True),
    "cancel": Kind("what is made in the background is cancelled", is_of_clients=True),
}


def kinds_of(shape: Shape) -> list[str]:
    return [name for name, kind in KINDS.items() if shape in kind.shapes]


def start(world: "World", fault: Fault) -> None:
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
        _change_weather(world, fault)


def _kill(world: "World", fault: Fault, role: str) -> None:
    if role == "router":
        router = world.routers.get(fault.target)
        if router is not None and not router.process.is_dead:
            _fired(world, fault)
            router.kill()
            world.after(fault.duration_s, router.revive)
    elif role == "instance":
        instance = world.instances[fault.target]
        if not instance.life.is_leaving:
            _fired(world, fault)
            instance.kill()
            world.after(fault.duration_s, instance.revive)
    else:
        for process in world.instances[fault.target].processes(role)[:1]:
            _fired(world, fault)
            process.kill()


def _stop(world: "World", fault: Fault, role: str) -> None:
    for process in _victims(world, fault.target, role):
        if not process.is_stopped:
            _fired(world, fault)
            process.stop()
            world.after(fault.duration_s, process.cont)


def _victims(world: "World", target: str, role: str) -> list[Process]:
    if role == "router":
        router = world.routers.get(target)
        return [router.process] if router is not None and not router.process.is_dead else []
    found = world.instances[target].processes(role)
    return found if role == "instance" else found[:1]


def _set_clock(world: "World", fault: Fault) -> None:
    """By up to half a minute, either way: more than requests wait, and less than proofs of the cluster's key allow."""
    offset_s = (fault.rate - 0.5) * 60.0
    if fault.target in world.routers:
        world.routers[fault.target].set_clock(offset_s)
        world.after(fault.duration_s, lambda: world.routers[fault.target].set_clock(0.0))
    else:
        world.instances[fault.target].set_clock(offset_s)
        world.after(fault.duration_s, lambda: world.instances[fault.target].set_clock(0.0))
    _fired(world, fault)


def _drain(world: "World", fault: Fault) -> None:
    instance = world.instances[fault.target]
    if instance.life.is_leaving:
        return
    _fired(world, fault)
    instance.leave()

    def revive() -> None:
        """The operator starts the next one when the old one is gone."""
        if instance.life.supervisor.is_dead:
            instance.revive()
        else:
            world.after(1.0, revive)

    world.after(fault.duration_s, revive)


def _change_weather(world: "World", fault: Fault) -> None:
    spell = world.weather.begin(fault.kind, fault.target, fault.rate)
    world.trace.note(f"{fault.kind} on {fault.target or 'all wires'} at {fault.rate:.2f} for {fault.duration_s:.2f} s")
    world.after(fault.duration_s, lambda: world.weather.end(spell))


def _fired(world: "World", fault: Fault) -> None:
    world.weather.fired[fault.kind] += 1
    world.trace.note(f"{fault.kind} {fault.target} for {fault.duration_s:.2f} s")
