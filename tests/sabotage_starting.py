"""Deliberate bugs in what a start needs, measures and says, and the tests that notice."""

from onward import extras
from onward.models import fingerprint
from onward.obs import memory_groups
from onward.supervisor import oom
from onward.supervisor.children import Child
from onward.supervisor.oom import OomEvidence, OomWatch
from tests.sabotage_kinds import Patches, Sabotage

OOM = "tests/supervisor/test_oom.py::"
TORCHLESS = "tests/e2e/test_without_torch.py::"


def _look_for_no_package(patch: Patches) -> None:
    patch.put(extras, "find_spec", lambda name: name)


def _torch_in_every_fingerprint(patch: Patches) -> None:
    patch.put(fingerprint, "_libraries", lambda device, scheme: ("torch", "numba", "numpy"))


def _own_group_only(patch: Patches) -> None:
    patch.around(memory_groups, "_up", lambda original, *place: original(*place)[:1])


def _max_without_high(patch: Patches) -> None:
    patch.around(
        memory_groups, "_number", lambda original, path: None if path.name == "memory.high" else original(path)
    )


def _every_sigkill_is_the_kernels(patch: Patches) -> None:
    patch.put(OomWatch, "explain", lambda self: OomEvidence.CERTAIN)


def _one_kill_explains_every_death(patch: Patches) -> None:
    patch.put(oom, "_one_more", lambda counts, most: counts)


def _own_kills_are_the_kernels(patch: Patches) -> None:
    patch.put(Child, "was_killed_elsewhere", True)


TABLE = [
    Sabotage(
        "parent-limits-ignored",
        "a parent's memory limit is ignored, and the pool is larger than what may be used",
        _own_group_only,
        [
            "tests/obs/test_memory_groups.py::test_a_nested_group_of_version_2_is_under_the_limits_of_all_above_it",
            "tests/worker/test_memory.py::test_the_tightest_limit_of_a_control_group_counts",
        ],
    ),
    Sabotage(
        "memory-high-ignored",
        "the pool grows beyond memory.high, where the kernel throttles",
        _max_without_high,
        ["tests/obs/test_memory_groups.py::test_a_nested_group_of_version_2_is_under_the_limits_of_all_above_it"],
    ),
    Sabotage(
        "every-sigkill-for-memory",
        "a process that was killed by hand is reported as killed for lack of memory",
        _every_sigkill_is_the_kernels,
        [OOM + "test_log_metric_and_view_say_which_process_was_killed_for_memory"],
    ),
    Sabotage(
        "oom-kill-counted-twice",
        "one kill of the kernel explains two deaths",
        _one_kill_explains_every_death,
        [OOM + "test_a_kill_that_the_own_group_counted_is_certain_and_explains_one_death"],
    ),
    Sabotage(
        "own-kill-for-memory",
        "a process that the supervisor killed is reported as killed for lack of memory",
        _own_kills_are_the_kernels,
        [OOM + "test_a_process_that_the_supervisor_killed_is_not_taken_for_one_of_the_kernel_s"],
    ),
    Sabotage(
        "packages-not-checked",
        "a flag that needs torch fails where torch is imported, with a traceback",
        _look_for_no_package,
        [TORCHLESS + "test_a_gguf_file_of_floats_is_refused_when_its_header_is_read"],
    ),
    Sabotage(
        "torch-in-every-fingerprint",
        "two int8 instances, one with torch and one without, do not exchange KV",
        _torch_in_every_fingerprint,
        ["tests/models/test_fingerprint.py::test_the_version_of_torch_counts_where_torch_computes[int8-g32-True]"],
    ),
]
