"""The actor of a member, in this process."""

import subprocess
from types import SimpleNamespace

import pytest

from onward.ray.member_actor import MemberActor
from onward.supervisor.cluster_member import MemberSpec
from tests.ray.test_guarded_command import WAIT, WAIT_S, raylet

__all__ = ["raylet"]


def test_each_report_says_whether_the_member_is_ready(
    raylet: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply with the first such report can be lost."""
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0123456789"))
    monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
    script = f"import sys; print('  Onward', flush=True); print('up', file=sys.stderr, flush=True); {WAIT}"
    actor = MemberActor(MemberSpec("router", "router", ("-c", script), "", None, None), "00" * 32, "  Onward", "")
    lines: list[str] = []
    try:
        while not (lines and actor._member.is_ready):
            lines += actor.next_report(WAIT_S).lines
        assert [actor.next_report(0.0).is_ready for _ in range(2)] == [True, True]
    finally:
        raylet.kill()
        while actor.next_report(WAIT_S).exit_code is None:
            pass
        process = actor._member.process
        assert process is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        actor._stack.close()
    assert lines == ["up"]
