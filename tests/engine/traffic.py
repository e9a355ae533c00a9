"""Random traffic as data: lists of actions that any harness can act out, and what its clients must have seen then."""

from hypothesis import strategies as st

from tests.engine.harness import Client, Harness

Action = tuple[str, object]

PROMPTS = st.tuples(st.integers(0, 3), st.integers(1, 40)).map(
    # Few families of prompts, so that prefixes are shared all the time.
    lambda drawn: [(drawn[0] * 7 + i // 3) % 50 for i in range(drawn[1])]
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(1, 24) | st.none(),
        "priority": st.integers(0, 2),
        "seed": st.integers(0, 3),  # 0 means greedy
        "end": st.sampled_from([(), (3,), (0, 9, 11)]),
        "min_tokens": st.integers(0, 4),
        "cache_salt": st.sampled_from(["", "salt"]),
        "logprobs": st.sampled_from([None, None, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "deadline_in_s": st.sampled_from([None, None, None, 0.5]),
    }
)
WHICH = st.integers(0, 30)
NOTHING = st.none()

SUBMIT = st.tuples(st.just("submit"), REQUESTS)
STEPS = st.tuples(st.sampled_from(["plan", "answer", "two_steps"]), NOTHING)
ENDINGS = st.tuples(st.sampled_from(["abort", "abort_epoch", "abort_by_name", "stop", "fail"]), WHICH)
REPETITIONS = st.tuples(st.sampled_from(["resubmit", "repeat"]), WHICH)
CRASHES = st.tuples(
    st.sampled_from(
        [
            "crash_worker",
            "kill_worker",
            "kill_worker",
            "crash_engine",
            "lose_worker",
            "lose_worker_and_keep_its_memory",
            "start_worker",
            "start_worker_with_new_memory",
        ]
    ),
    NOTHING,
)
TIME = st.tuples(st.just("tick"), NOTHING)

CALM = st.one_of(SUBMIT, STEPS, STEPS, STEPS)
ROUGH = st.one_of(SUBMIT, SUBMIT, STEPS, STEPS, STEPS, ENDINGS, REPETITIONS, CRASHES, TIME)

SHAPES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 14) | st.integers(15, 40),
        "block_size": st.sampled_from([1, 4, 5]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 7, 16, 64]),
        "max_steps_in_flight": st.sampled_from([2, 2, 1, 3]),
        "prefix_caching": st.booleans(),
        "output_caching": st.booleans(),
        "num_draft_tokens": st.sampled_from([0, 3, 7]),
    }
)


class Actor:
    """Acts a list of actions out, and remembers which requests may have ended in another way than by themselves."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.aborted: set[str] = set()
        self.failed: set[str] = set()

    def act(self, action: Action) -> None:
        kind, value = action
        clients = list(self.harness.clients.values())
        match kind, value:
            case "submit", dict():
                self._submit(value)
            case "plan", _:
                self.harness.plan()
            case "answer", _ if self.harness.plans:
                self.harness.answer()
            case "two_steps", _:
                self.act(("plan", None))
                self.act(("plan", None))
                self.act(("answer", None))
                self.act(("answer", None))
            case "crash_worker", _:
                self.harness.crash_worker()
            case "kill_worker", _:
                self.harness.crash_worker(keeps_memory=True)
            case "lose_worker", _:
                self.harness.lose_worker()
            case "lose_worker_and_keep_its_memory", _:
                self.harness.lose_worker(keeps_memory=True)
            case "start_worker", _:
                self.harness.start_worker()
            case "start_worker_with_new_memory", _:
                self.harness.start_worker(attaches=False)
            case "crash_engine", _:
                self.harness.crash_engine()
            case "tick", _:
                self.harness.tick(0.3)
            case _, int() if clients:
                self._act_on(kind, clients[value % len(clients)])

    def check_clients(self) -> None:
        """Everybody got the tokens of an undisturbed run, once and in order, or the beginning of them and a reason."""
        for client in self.harness.clients.values():
            request_id, sampling = client.submit.request_id, client.submit.sampling_params
            assert client.num_finishes == 1, request_id
            if client.error_code == "context_length_exceeded":
                wanted = len(client.submit.prompt_token_ids) + (sampling.max_tokens or 1)
                assert wanted > self.harness.max_tokens
                continue
            expected = self.harness.expected(client)
            if self._ended_early(client):
                assert client.tokens == expected[: len(client.tokens)], request_id
            else:
                assert client.tokens == expected, request_id
                ended = expected[-1] in sampling.end_token_ids and len(expected) > sampling.min_tokens
                assert client.finish_reason == ("stop" if ended else "length"), request_id

    def _submit(self, request: dict) -> None:
        fields = dict(request)
        most = fields["max_tokens"] if fields["max_tokens"] is not None else 4
        self.harness.submit(
            f"r{len(self.harness.clients)}",
            fields.pop("prompt"),
            temperature=1.0 if fields["seed"] else 0.0,
            min_tokens=min(fields.pop("min_tokens"), most),
            **fields,
        )

    def _act_on(self, kind: str, client: Client) -> None:
        request_id, open_ = client.submit.request_id, client.finish_reason is None
        match kind:
            case "abort":
                self.aborted.add(request_id)
                self.harness.abort(request_id)
            case "abort_epoch":
                self.aborted.add(request_id)
                self.harness.abort(request_id, epoch=client.submit.epoch)
            case "abort_by_name":
                self.aborted.add(request_id)
                answer = self.harness.abort_by_name(request_id, "")
                assert "" in answer.unknown
                assert not open_ or answer.aborted == [request_id]
            case "stop" if open_ and client.tokens:
                self.aborted.add(request_id)
                self.harness.stop(client, len(client.tokens) - 1)
            case "fail" if open_:
                self.failed.add(request_id)
                self.harness.doomed.add(request_id)
            case "resubmit" if open_:
                self.harness.resubmit(client)
            case "repeat":
                self.harness.repeat(client)

    def _ended_early(self, client: Client) -> bool:
        request_id = client.submit.request_id
        match client.finish_reason, client.error_code:
            case "abort", None:
                assert request_id in self.aborted
            case "stop", None if request_id in self.aborted:
                pass
            case "error", "invalid_logits":
                assert request_id in self.failed
            case "error", "deadline_exceeded":
                assert client.submit.deadline_in_s is not None
            case "error", code:
                assert code == "crashed_worker", code
            case _:
                return False
        return True
