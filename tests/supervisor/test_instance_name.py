"""An instance is called the same in its own view, in `onward status` and in a router's log."""

from onward.config import ServeConfig
from tests.supervisor.stand_ins import supervisor_of


def test_the_id_of_an_instance_begins_with_its_name() -> None:
    with supervisor_of(ServeConfig(instance_name="decode-1")) as supervisor:
        first = supervisor._instance_view(1).incarnation
    with supervisor_of(ServeConfig(instance_name="decode-1")) as again:
        second = again._instance_view(1).incarnation
    assert first.startswith("decode-1-")
    assert second.startswith("decode-1-")
    assert first != second, "a restart is another incarnation"
