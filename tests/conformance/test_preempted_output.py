"""A preempted request's output equals the undisturbed one's."""

import pytest

from tests.conformance.conftest import Connect
from tests.conformance.wires import WiredHarness


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix caching", "no caching"])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 64], ids=["in chunks", "at once"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_drafts", [0, 4], ids=["no drafts", "drafts"])
def test_a_preempted_request_s_output_equals_the_undisturbed_one_s(
    connect: Connect, num_drafts: int, temperature: float, max_num_batched_tokens: int, prefix_caching: bool
) -> None:
    def outputs(num_blocks: int) -> tuple[WiredHarness, dict[str, list[int]]]:
        harness = connect(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
            num_draft_tokens=num_drafts,
        )
        for i in range(10):
            prompt = [i % 3 + 1] * 6 + list(range(i + 4))
            harness.submit(f"r{i}", prompt, max_tokens=40, temperature=temperature, seed=i, logprobs=1)
        harness.run_until_idle()
        harness.check_all_exact()
        harness.core.audit_idle()
        return harness, {request_id: client.tokens for request_id, client in harness.clients.items()}

    undisturbed, calm = outputs(200)
    pressed, disturbed = outputs(22)
    assert disturbed == calm
    assert undisturbed.metric("preemptions") == 0
    assert pressed.metric("preemptions") >= 5
    for harness in (undisturbed, pressed):
        overlapped = [record.overlapped for record in harness.core.step_log.records]
        assert sum(overlapped) > len(overlapped) / 2, "steps overlap"
