"""Deliberate bugs in what a start needs, measures and says, and the tests that notice."""

from collections.abc import Callable
from contextlib import nullcontext

import msgspec
from numba.core.caching import UserProvidedCacheLocator

from onward import optional_packages
from onward.api.requests.schemas import ChatCompletionRequest, GenerationRequest
from onward.cli import doctor, machine_facts, serve, start_summary
from onward.kernels.cpu import compile_progress
from onward.kernels.cpu.cache_locator import KernelCacheLocator
from onward.models import fingerprint
from onward.models.loader import file_property_cache
from onward.obs import cgroup_cpu, cgroup_memory
from onward.proto.router import Attempt
from onward.router import client_request
from onward.router.client_stream import ClientStream
from onward.supervisor import oom, secret_file
from onward.supervisor.child_process import ChildProcess
from onward.supervisor.oom import OomEvidence, OomWatch
from tests.sabotage.patches import Patches, Sabotage

DEFAULT = "tests/api/test_default_max_tokens.py::"
ROUTED_DEFAULT = "tests/router/test_default_max_tokens.py::"
SUMMARY = "tests/cli/test_start_summary.py::"
OOM = "tests/supervisor/test_oom.py::"
DOCTOR = "tests/cli/test_doctor.py::"
TORCHLESS = "tests/e2e/test_without_torch.py::"


def _quota_of_the_nearest_group(patch: Patches) -> None:
    patch.shadow(cgroup_cpu, "min", lambda quotas, default: quotas[0] if quotas else default)


def _a_doctor_that_is_never_worried(patch: Patches) -> None:
    patch.put(doctor, "can_serve", lambda checks: True)


def _ports_are_not_bound(patch: Patches) -> None:
    patch.put(machine_facts, "_port_error", lambda host, port: None)


def _groups_read_any_secret(patch: Patches) -> None:
    patch.put(secret_file, "ROOT_UID", 1000)


def _look_for_no_package(patch: Patches) -> None:
    patch.put(optional_packages, "find_spec", lambda name: name)


def _torch_in_every_fingerprint(patch: Patches) -> None:
    patch.put(fingerprint, "_libraries", lambda device, scheme: ("torch", "numba", "numpy"))


def _own_group_only(patch: Patches) -> None:
    patch.around(cgroup_memory, "_cgroup_and_ancestors", lambda original, *place: original(*place)[:1])


def _max_without_high(patch: Patches) -> None:
    patch.around(
        cgroup_memory, "_number", lambda original, path: None if path.name == "memory.high" else original(path)
    )


def _every_sigkill_is_the_kernels(patch: Patches) -> None:
    patch.put(OomWatch, "explain_kill", lambda self: OomEvidence.CERTAIN)


def _one_kill_explains_every_death(patch: Patches) -> None:
    patch.put(oom, "_minus_explained_kill", lambda counts, most: counts)


def _own_kills_are_the_kernels(patch: Patches) -> None:
    patch.put(ChildProcess, "killed_externally", True)


def _retries_without_the_default(patch: Patches) -> None:
    def attempt(original: Callable, self: ClientStream, *given: object) -> Attempt:
        made = original(self, *given)
        return msgspec.structs.replace(made, default_max_tokens=0) if self.epoch > 1 else made

    patch.around(ClientStream, "build_attempt", attempt)


def _records_without_the_default(patch: Patches) -> None:
    def replace_but(original: Callable, changed: object, **fields: object) -> object:
        return original(changed, **{name: value for name, value in fields.items() if name != "default_max_tokens"})

    patch.around(client_request, "replace", replace_but)


def _a_default_for_chats(patch: Patches) -> None:
    patch.put(ChatCompletionRequest, "has_default_limit", True)


def _no_default(patch: Patches) -> None:
    patch.put(GenerationRequest, "has_default_limit", False)


def _kernels_from_writable_folders_only(patch: Patches) -> None:
    patch.put(KernelCacheLocator, "ensure_cache_path", UserProvidedCacheLocator.ensure_cache_path)


def _facts_must_be_kept(patch: Patches) -> None:
    patch.shadow(file_property_cache, "OSError", KeyError)


def _no_word_about_a_small_pool(patch: Patches) -> None:
    for module in (start_summary, serve):
        patch.put(module, "pool_warning", lambda worker: None)


def _compile_in_silence(patch: Patches) -> None:
    patch.put(compile_progress, "report_compile_progress", lambda progress: nullcontext())


TABLE = [
    Sabotage(
        "secret-of-a-group",
        "a group may read a secret although its owner is not root",
        _groups_read_any_secret,
        ["tests/supervisor/test_secret_file.py::test_only_root_may_open_a_secret_to_a_group[33056-1000-False]"],
    ),
    Sabotage(
        "cpu-quota-above",
        "a quota that a group above the own one has is not seen",
        _quota_of_the_nearest_group,
        [
            "tests/obs/test_cgroup_cpu.py::test_the_tightest_quota_of_all_groups_above_counts"
            "[400000 100000-50000 100000-0.5]"
        ],
    ),
    Sabotage(
        "doctor-never-worried",
        "the exit status of `onward doctor` does not say that a server would not start",
        _a_doctor_that_is_never_worried,
        [DOCTOR + "test_a_script_reads_json_and_the_exit_status"],
    ),
    Sabotage(
        "doctor-ports",
        "`onward doctor` does not notice that a port is in use",
        _ports_are_not_bound,
        [DOCTOR + "test_a_script_reads_json_and_the_exit_status"],
    ),
    Sabotage(
        "small-pool-unsaid",
        "a start says nothing about a KV pool that holds no request of the context's length",
        _no_word_about_a_small_pool,
        [SUMMARY + "test_a_pool_smaller_than_the_context_is_a_warning"],
    ),
    Sabotage(
        "silent-compilation",
        "a first start shows no progress while it compiles kernels",
        _compile_in_silence,
        [SUMMARY + "test_compiling_kernels_is_told_in_fractions"],
    ),
    Sabotage(
        "read-only-kernels-ignored",
        "kernels in a read-only cache folder are compiled again at each start",
        _kernels_from_writable_folders_only,
        ["tests/e2e/test_read_only_cache.py::test_a_complete_cache_that_is_read_only_serves"],
    ),
    Sabotage(
        "facts-must-be-kept",
        "a server does not start since it cannot write down a file's hash",
        _facts_must_be_kept,
        ["tests/e2e/test_read_only_cache.py::test_a_fact_that_cannot_be_kept_is_learned_each_time"],
    ),
    Sabotage(
        "no-default-max-tokens",
        "a completion without max_tokens goes on to the end of the context",
        _no_default,
        [DEFAULT + "test_completions_end_at_16_tokens_unless_the_request_or_the_server_says_otherwise"],
    ),
    Sabotage(
        "default-max-tokens-for-chats",
        "a chat without max_tokens ends after 16 tokens",
        _a_default_for_chats,
        [DEFAULT + "test_a_chat_goes_on_to_the_end_of_the_context"],
    ),
    Sabotage(
        "retry-forgets-default-max-tokens",
        "a completion that is retried ends elsewhere than the first attempt would have",
        _retries_without_the_default,
        [ROUTED_DEFAULT + "test_every_attempt_has_the_limit_of_the_router_that_the_request_came_to"],
    ),
    Sabotage(
        "record-forgets-default-max-tokens",
        "a completion that is resumed from a record ends elsewhere than it would have",
        _records_without_the_default,
        [ROUTED_DEFAULT + "test_a_stream_that_an_instance_has_kept_keeps_its_limit_at_another_router"],
    ),
    Sabotage(
        "parent-limits-ignored",
        "a parent's memory limit is ignored, and the pool is larger than what may be used",
        _own_group_only,
        [
            "tests/obs/test_cgroup_memory.py::test_a_nested_group_of_version_2_is_under_the_limits_of_all_above_it",
            "tests/worker/test_memory.py::test_the_tightest_limit_of_a_control_group_counts",
        ],
    ),
    Sabotage(
        "memory-high-ignored",
        "the pool grows beyond memory.high, where the kernel throttles",
        _max_without_high,
        ["tests/obs/test_cgroup_memory.py::test_a_nested_group_of_version_2_is_under_the_limits_of_all_above_it"],
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
