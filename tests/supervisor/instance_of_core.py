"""A `SupervisorCore` whose actions are carried out by keeping them: starts succeed at once, and a test reads the rest."""

import signal
from typing import Any, TypeVar

from onward.proto.control import ChildReady, FromChild
from onward.supervisor.children import Child, ProcessRole
from onward.supervisor.core import (
    ActivateStandby,
    KillProcess,
    RemoveProcess,
    SendMessage,
    StartProcess,
    SupervisorAction,
    SupervisorCore,
    SupervisorSettings,
)
from tests.transport.test_zmq import HELLO

T = TypeVar("T")


class InstanceOfCore:
    def __init__(
        self,
        *,
        num_apis: int = 1,
        stall_timeout_s: float = 5.0,
        drain_s: float = 30.0,
        serves_handoffs: bool = False,
        allows_kills: bool = False,
        owns_kv_memory: bool = False,
        has_standby: bool = False,
        awaits_release: bool = False,
    ) -> None:
        self.now_s = 1000.0
        self.core = SupervisorCore(
            SupervisorSettings(
                num_apis,
                stall_timeout_s,
                drain_s,
                serves_handoffs,
                allows_kills,
                owns_kv_memory,
                has_standby,
                awaits_release,
            ),
            self.now_s,
        )
        self.actions: list[SupervisorAction] = []
        """Since they were last taken; without starts."""
        self.starts: list[ProcessRole] = []
        self._number = 0

    def make_ready(self) -> None:
        """All processes run, and nothing is left to read."""
        self.start()
        self.ready(ProcessRole.ENGINE)
        self.ready(ProcessRole.STREAM_STORE)
        for api in self.core.children_of(ProcessRole.API):
            self._carry_out(self.core.on_message(api, ChildReady(), self.now_s))
        assert self.core.was_ready
        self.take()
        self.starts.clear()

    def start(self) -> None:
        self._carry_out(self.core.start())

    def begin_serving(self, *, keeps_memory: bool) -> None:
        """As a new server whose old one has ended."""
        self._carry_out(self.core.begin_serving(keeps_memory=keeps_memory))

    def start_again(self, *, keeps_memory: bool) -> None:
        """As an old server whose new one has failed."""
        self._carry_out(self.core.start_again(self.now_s, keeps_memory=keeps_memory))

    def replace_stopped(self, *children: Child) -> None:
        """A signal has stopped them for too long."""
        self._carry_out(self.core.replace_stopped(children))

    def stop_for_successor(self) -> None:
        self._carry_out(self.core.stop_for_successor(self.now_s))

    def child(self, role: ProcessRole) -> Child:
        return self.core.children_of(role)[0]

    def ready(self, role: ProcessRole) -> None:
        self.receive(role, ChildReady(HELLO if role is ProcessRole.ENGINE else None))

    def receive(self, role: ProcessRole, message: FromChild) -> None:
        self._carry_out(self.core.on_message(self.child(role), message, self.now_s))
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        if not self.core.is_stopped:
            self._carry_out(self.core.tick(self.now_s))

    def die(self, role: ProcessRole, return_code: int = -signal.SIGKILL, *, peer_may_write: bool = False) -> Child:
        """Its first process; restarts that are due happen."""
        child = self.child(role)
        exited = self.core.on_exit(child, return_code, "killed", self.now_s, peer_may_write=peer_may_write)
        self._carry_out(exited)
        self.advance(0.0)
        return child

    def stop(self) -> None:
        self._carry_out(self.core.stop(self.now_s))

    def take(self) -> list[SupervisorAction]:
        taken, self.actions = self.actions, []
        return taken

    def take_messages(self, role: ProcessRole, kind: type[T] | Any = object) -> list[T]:
        """Messages of this kind to processes of this role. All actions are taken."""
        sent = [action for action in self.take() if isinstance(action, SendMessage) and action.child.role is role]
        return [action.message for action in sent if isinstance(action.message, kind)]

    def take_killed(self) -> list[Child]:
        return [action.child for action in self.take() if isinstance(action, KillProcess | RemoveProcess)]

    def _carry_out(self, actions: list[SupervisorAction]) -> None:
        for action in actions:
            if isinstance(action, StartProcess):
                self.starts.append(action.role)
                self._number += 1
                incarnation = f"{action.role.value}-{self._number}"
                started = self.core.on_started(
                    action.role, action.index, incarnation, f"address of {incarnation}", self.now_s
                )
                self._carry_out(started)
            else:
                if isinstance(action, ActivateStandby):
                    self.core.on_activated(action.child, self.now_s)
                self.actions.append(action)
