"""What is left of an instance when every process of it was killed with SIGKILL: nothing."""

import os
import signal
from pathlib import Path

from tests.e2e.observed_estate import wait_until
from tests.e2e.pd_instances import Pair, kill_all, wait_for
from tests.e2e.server import Server
from tests.e2e.streams import chat_body, run_streams
from tests.e2e.test_standby import after_tokens, wait_for_standby

BODIES = [chat_body(index, 24) for index in range(4)]

Inode = tuple[int, int]


def processes_of(server: Server) -> set[int]:
    """All that were started for this server and still run: they inherit its temporary folder, which no other has."""
    marker = f"TMPDIR={server.temporary_folder}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
        except OSError:
            continue  # it has ended meanwhile
    return found | {child for pid in found for child in descendants(pid)}


def descendants(pid: int) -> set[int]:
    """Also those that were started without an environment."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    except OSError:
        return set()
    return children | {grandchild for child in children for grandchild in descendants(child)}


def memory_files(pids: set[int]) -> set[Inode]:
    """Memory without a name in the file system that these processes have open or mapped."""
    found: set[Inode] = set()
    for pid in pids:
        for folder in ("fd", "map_files"):
            found |= _memory_in(Path(f"/proc/{pid}/{folder}"))
    return found


def _memory_in(folder: Path) -> set[Inode]:
    found = set()
    try:
        for path in folder.iterdir():
            if "/memfd:" in str(path.readlink()):
                status = path.stat()
                found.add((status.st_dev, status.st_ino))
    except OSError:
        pass  # it has ended meanwhile
    return found


def all_pids() -> set[int]:
    return {int(path.name) for path in Path("/proc").glob("[0-9]*")}


def shared_memory_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def kill_everything(server: Server) -> set[Inode]:
    """The supervisor cannot start anything again meanwhile. Returns the memory that its processes had; none of them runs
    any more."""
    pids = processes_of(server)
    supervisor = server.get("/info")["pids"]["supervisor"][0]
    assert len(pids) >= 5
    memory = memory_files(pids)
    os.kill(supervisor, signal.SIGSTOP)
    pids |= processes_of(server)
    kill_all(list(pids - {supervisor}))
    server.stop(signal.SIGKILL)
    wait_until(lambda: not pids & all_pids())
    return memory


def test_nothing_remains_of_an_instance_whose_processes_are_all_killed() -> None:
    names = shared_memory_names()
    with Server("--max-num-seqs", "8", "--standby-worker", "on") as server:
        wait_for_standby(server)
        worker = server.pid("worker")
        run_streams(server.url, BODIES, after_tokens([5], lambda: os.kill(worker, signal.SIGKILL)))
        wait_for_standby(server)
        memory = kill_everything(server)
        assert len(memory) >= 3, "pool, table of block hashes, wire to the worker"
        assert not memory_files(all_pids()) & memory
        assert server.leftovers() == []
    assert shared_memory_names() <= names


def test_a_peer_holds_no_memory_of_a_decode_instance_whose_processes_are_all_killed() -> None:
    names = shared_memory_names()
    with Pair("--standby-worker", "on") as pair:
        run_streams(pair.decode.url, BODIES)
        prefill = processes_of(pair.prefill)
        shared = memory_files(processes_of(pair.decode)) & memory_files(prefill)
        assert shared, "the peer's worker has mapped the pool"
        memory = kill_everything(pair.decode)
        wait_for(lambda: not memory_files(prefill) & memory, "a peer without memory of the dead")
        assert not memory_files(all_pids()) & memory
        pair.start_decode()
        run_streams(pair.decode.url, BODIES)
        rest = kill_everything(pair.decode) | kill_everything(pair.prefill)
        assert not memory_files(all_pids()) & rest
    assert shared_memory_names() <= names
