"""One run: builds the processes of a scenario, runs them, and checks the invariants throughout."""

import asyncio
import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import cache
from typing import Any

from onward.api.requests.grammar_validator import GrammarValidator
from onward.api.requests.text_processor import TextProcessor
from onward.config import RouterConfig
from onward.proto.model import TokenizerFiles
from onward.sim import fault_kinds, message_check, response_check, tenants, vocabulary
from onward.sim.client import ClientTotals, SimClient
from onward.sim.engine_wires import SimAddresses
from onward.sim.http import SimHttpNetwork, url_of
from onward.sim.instance import SimEnvironment, SimInstance
from onward.sim.invariants import InvariantMonitor
from onward.sim.kv_transfer import ForbiddenKvWrite, SimKvNetwork
from onward.sim.loop import START_S, Livelock, VirtualLoop
from onward.sim.messages_client import SimMessagesClient
from onward.sim.nodes import RouterNode
from onward.sim.process import SimProcess, install_task_factory
from onward.sim.reply_check import InvariantError
from onward.sim.responses_client import SimResponsesClient
from onward.sim.scenario import RunResult, Scenario, SimRequest, Violation
from onward.sim.seeded_random import SeededRandom
from onward.sim.tenants import IntruderClient
from onward.sim.wire import ActiveFaults, SimContext, Trace
from onward.supervisor.restart_policy import COOL_DOWN_S
from onward.text.prompt_tokenizer import PromptTokenizer
from onward.text.tokenizer import Tokenizer
from onward.web.auth.api_key_table import ApiKeyTable

PATIENCE_S = 90.0
"""All requests must be answered within this time after the last fault and the last request."""
SETTLING_S = 100.0
"""All resources must be released within this time after that."""


def run_scenario(scenario: Scenario, *, keeps_lines: bool = False, keeps_messages: bool = False) -> RunResult:
    return Simulation(scenario, keeps_lines, keeps_messages).run()


@cache
def _shared_text_processor() -> TextProcessor:
    return TextProcessor(vocabulary.model_text(), make_validator=_new_validator)


def _new_validator(files: TokenizerFiles, tokenizer: Tokenizer | None) -> GrammarValidator:
    return GrammarValidator(files, tokenizer, vocabulary.grammars())


_CLIENTS: dict[str, type[SimClient]] = {
    response_check.PATH: SimResponsesClient,
    message_check.PATH: SimMessagesClient,
}
"""Client types by path. All other paths have a `SimClient`."""


def _new_text_processor() -> TextProcessor:
    """Returns a text processor that shares everything constant with other runs. Each run has its own grammar validator,
    because a validator answers sooner for known grammars, and a run must not depend on earlier runs."""
    processor = copy.copy(_shared_text_processor())
    processor.grammar_validator = _new_validator(vocabulary.model_text(), processor.prompt_tokenizer.tokenizer)
    return processor


@cache
def _prompt_tokens() -> PromptTokenizer:
    return PromptTokenizer(vocabulary.model_text())


class Simulation:
    def __init__(self, scenario: Scenario, keeps_lines: bool, keeps_messages: bool) -> None:
        self.scenario = scenario
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._on_fault)
        install_task_factory(self.loop)
        random = SeededRandom(scenario.seed, "run")
        self.trace = Trace(self.loop, keeps_lines, keeps_messages)
        self.active_faults = ActiveFaults(random.substream("weather"))
        self._pending = [fault for fault in scenario.faults if fault.trigger is not None]
        self.sim_context = context = SimContext(
            self.loop,
            random,
            self.active_faults,
            self.trace,
            scenario.delay_s,
            [self._watch_messages] if self._pending else [],
        )
        self.http = SimHttpNetwork(context)
        self.totals = ClientTotals()
        self.violation: Violation | None = None
        self.watch = InvariantMonitor(self)
        self.routers: dict[str, RouterNode] = {}
        self.instances: dict[str, SimInstance] = {}
        self.clients: list[SimClient] = []
        self._num_seen: dict[int, int] = {}
        self._num_unanswered = 0
        self._context = Context()
        """Context of callbacks that belong to no process."""

    # The run.

    def run(self) -> RunResult:
        with capture_logged_errors(self._on_logged):
            asyncio._set_running_loop(self.loop)
            try:
                self._build()
            finally:
                asyncio._set_running_loop(None)
            try:
                self._run_to_end()
            finally:
                self._tear_down()
        return self._outcome()

    def _build(self) -> None:
        scenario = self.scenario
        keys = tenants.key_entries(scenario.callers, scenario.max_in_flight)
        cluster_key = tenants.CLUSTER_KEY if keys else ""
        for index in range(scenario.num_routers):
            name = f"r{index}"
            self.routers[name] = RouterNode(self.http, name, self._router_config(), ApiKeyTable(keys), cluster_key)
        environment = SimEnvironment(
            http=self.http,
            addresses=SimAddresses(),
            kv_network=SimKvNetwork(),
            model=vocabulary.prepared_model(),
            prompts=_new_text_processor(),
            routers=() if scenario.uses_static_instances else tuple(router.url for router in self.routers.values()),
            prefill_peers=()
            if self.routers
            else tuple(f"tcp://{spec.name}:7000" for spec in scenario.instances if spec.role == "prefill"),
            keys=tuple(keys),
            cluster_key=cluster_key,
            after_turn=self.watch.after_turn,
            watch_write=self.watch.on_write,
            watch_plan=self.watch.on_plan,
        )
        for spec in scenario.instances:
            self.instances[spec.name] = SimInstance(environment, spec)
        urls = [router.url for router in self.routers.values()] or [
            instance.url for instance in self.instances.values() if instance.spec.role != "prefill"
        ]
        for request in scenario.requests:
            self._add_client(request, urls)
        for fault in scenario.faults:
            if fault.trigger is None:
                self.after(fault.at_s, lambda fault=fault: fault_kinds.inject(self, fault))

    def _router_config(self) -> RouterConfig:
        scenario = self.scenario
        return RouterConfig(
            instances=",".join(url_of(spec.name) for spec in scenario.instances if scenario.uses_static_instances),
            route=tuple(scenario.routes),
            policy=scenario.policy,  # pyright: ignore[reportArgumentType]
            preempt_retry_count=scenario.preempt_retry_count,
            preempt_retry_exclude_decode=scenario.preempt_retry_exclude_decode,
            retry_budget=scenario.retry_budget,
            stall_timeout_s=6.0,
            restart_grace_s=3.0,
        )

    def _add_client(self, request: SimRequest, urls: list[str]) -> None:
        process = SimProcess(self.loop, f"client-{request.name}")
        client = self._new_client(process, request, urls)
        self.clients.append(client)
        self._num_unanswered += 1
        process.start(self._guarded(client))
        for name in self.scenario.callers:
            if name != request.caller:
                stranger = SimProcess(self.loop, f"stranger-{request.name}-{name}")
                stranger.start(
                    self._run_intruder(client, IntruderClient(self.http, stranger, name, request.path, urls))
                )

    def _new_client(self, process: SimProcess, request: SimRequest, urls: list[str]) -> SimClient:
        client_type = _CLIENTS.get(request.path, SimClient)
        return client_type(
            self.http,
            process,
            request,
            urls,
            _prompt_tokens(),
            self.totals,
            self.watch,
            expects_calm=self.scenario.expects_no_errors,
            is_routed=bool(self.routers),
        )

    async def _guarded(self, client: SimClient) -> None:
        try:
            await client.run()
            self._num_unanswered -= 1
        except InvariantError as wrong:
            self.fail(wrong.invariant, f"{client.request.name}: {wrong.what}")

    async def _run_intruder(self, client: SimClient, stranger: IntruderClient) -> None:
        while not client.is_over and not self._is_failed:
            await asyncio.sleep(tenants.PRY_EVERY_S)
            checker = client.checker
            if checker is None or not (checker.cursor or checker.response_id):
                continue
            try:
                if checker.response_id:
                    await stranger.try_access_response(checker.response_id)
                if checker.cursor:
                    await stranger.try_access_stream(checker.cursor, client.label, client.body)
                self.active_faults.trigger_counts["pry"] += 1
            except InvariantError as wrong:
                self.fail(wrong.invariant, f"{client.request.name}: {wrong.what}")

    def _run_to_end(self) -> None:
        scenario = self.scenario
        last_s = max(
            [fault.at_s + fault.duration_s for fault in scenario.faults]
            + [request.at_s for request in scenario.requests]
            + [0.0]
        )
        try:
            # A request that kills one worker or engine after another makes supervisors pause before the next start, at
            # most twice.
            poisons = (vocabulary.POISON, vocabulary.ENGINE_POISON)
            is_poisoned = any(poison in request.prompt for request in scenario.requests for poison in poisons)
            patience_s = PATIENCE_S + 2 * COOL_DOWN_S * is_poisoned
            self.loop.run_until(START_S + last_s + patience_s, lambda: self._is_failed or self._all_answered)
            if not self._is_failed and not self._all_answered:
                unanswered = [client.request.name for client in self.clients if not client.is_over]
                self.fail(6, f"not answered {patience_s:g} s after the last fault: {', '.join(unanswered)}")
            # All requests are answered. Resources that are released after a while are released now.
            self.loop.run_until(self.loop.now_s + SETTLING_S, lambda: self._is_failed or self.watch.is_settled())
            if not self._is_failed:
                self.watch.audit()
        except ForbiddenKvWrite as death:
            self.fail(5, str(death))
        except Livelock as fault:
            self.fail(6, str(fault))
        self._ended_s = self.trace.at_s
        self.trace.close()

    @property
    def _is_failed(self) -> bool:
        return self.violation is not None

    @property
    def _all_answered(self) -> bool:
        return not self._num_unanswered and self.active_faults.is_empty

    def _tear_down(self) -> None:
        self.sim_context.is_over = True
        self.loop.num_events = 0
        for process in [*self._processes(), *(client.process for client in self.clients)]:
            process.kill()
        self.loop.run_until(self.loop.now_s + 5.0, lambda: False)
        self.loop.close()

    def _processes(self) -> list[SimProcess]:
        running = [process for instance in self.instances.values() for process in instance.processes("instance")]
        return [*running, *(router.process for router in self.routers.values())]

    # Called from other modules.

    def after(self, seconds: float, callback: Callable[[], Any]) -> None:
        """Schedules a call in global virtual time."""
        self.loop.call_at_global(self.loop.now_s + seconds, self._context, callback)

    def fail(self, invariant: int, what: str) -> None:
        if self.violation is None:
            self.violation = Violation(invariant, what, round(self.trace.at_s, 4))
            self.trace.note(f"VIOLATION of {invariant}: {what}")

    def _on_fault(self, _: Any, context: dict[str, Any]) -> None:
        """Fails the run because of an exception that was not caught."""
        fault = context.get("exception")
        if isinstance(fault, ForbiddenKvWrite):
            self.fail(5, str(fault))
        elif isinstance(fault, InvariantError):
            self.fail(fault.invariant, fault.what)
        elif self.violation is None:
            where = _where(fault) if fault is not None else ""
            # The text of a handle has its memory address, and a run must have the same text each time.
            message = context["message"].partition("(")[0].strip()
            self.fail(0, f"{message}: {type(fault).__name__}: {fault} {where}")

    def _on_logged(self, message: str, fault: BaseException | None) -> None:
        """Fails the run if a server has logged an exception. A server that catches its own bug keeps running, but the
        bug is still a finding."""
        if fault is not None:
            self._on_fault(None, {"message": message, "exception": fault})

    def _watch_messages(self, wire: str, kind: str) -> None:
        for index, fault in enumerate(self._pending):
            trigger = fault.trigger
            assert trigger is not None
            if trigger.message == kind and trigger.wire in wire:
                seen = self._num_seen[index] = self._num_seen.get(index, 0) + 1
                if seen == trigger.nth:
                    self.after(fault.at_s, lambda fault=fault: fault_kinds.inject(self, fault))

    def _outcome(self) -> RunResult:
        triggered: dict[str, int] = dict(sorted(self.active_faults.trigger_counts.items()))
        return RunResult(
            scenario=self.scenario,
            violation=self.violation,
            trace=self.trace.lines,
            digest=self.trace.digest(),
            virtual_s=round(self._ended_s, 3),
            num_requests=self.totals.num_requests,
            num_tokens=self.totals.num_tokens,
            triggered=triggered,
            end_reasons=dict(sorted(self.totals.end_reasons.items())),
            num_errors=self.totals.num_errors,
            num_resumes=self.watch.num_resumes(),
        )


def _where(fault: BaseException) -> str:
    """Returns the innermost file and line of the traceback, because a reader may have only the trace."""
    traceback = fault.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return (
        f"({traceback.tb_frame.f_code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno})"
        if traceback is not None
        else ""
    )


class _ErrorHandler(logging.Handler):
    def __init__(self, on_error: Callable[[str, BaseException | None], None]) -> None:
        super().__init__(logging.ERROR)
        self._on_error = on_error

    def emit(self, record: logging.LogRecord) -> None:
        self._on_error(record.getMessage(), record.exc_info[1] if record.exc_info else None)


@contextlib.contextmanager
def capture_logged_errors(on_error: Callable[[str, BaseException | None], None]) -> Iterator[None]:
    """Silences the log while a simulation runs, and passes each logged error to `on_error`: an error that the code
    under test has caught and logged is a finding."""
    logger = logging.getLogger("onward")
    before = logger.level, logger.propagate
    catcher = _ErrorHandler(on_error)
    logger.addHandler(catcher)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(catcher)
        logger.level, logger.propagate = before
        logger.manager._clear_cache()  # type: ignore[attr-defined]
