"""Stand-ins for Ray's functions as a cluster uses them. Its actors return reports that the test has written down."""

import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from onward.ray import ray_cluster, ray_member
from onward.ray.member_actor import MemberReport

Outcome = MemberReport | RayError


@dataclass(eq=False)
class StandInActor:
    ray: "StandInRay"
    name: str
    command: tuple[str, ...]
    outcomes: Iterator[Outcome]
    signals: list[int] = field(default_factory=list)

    @property
    def next_report(self) -> Any:
        return SimpleNamespace(remote=lambda _timeout_s: self)  # the actor is the reference to its next report

    @property
    def send_signal(self) -> Any:
        return SimpleNamespace(remote=self.signals.append)

    def outcome(self) -> Outcome:
        if signal.SIGTERM in self.signals:
            return MemberReport("node", exit_code=0)
        return next(self.outcomes, MemberReport("node"))


@dataclass
class StandInRay:
    outcomes: Mapping[str, Sequence[Sequence[Outcome]]]
    """What each start of a member reports, by name. Then nothing happens until it is asked to stop."""
    actors: dict[str, list[StandInActor]] = field(default_factory=lambda: defaultdict(list))
    bundles: list[dict[str, float]] = field(default_factory=list)

    def remote(self, _class: type) -> "StandInRay":
        return self

    def options(self, **_options: Any) -> Any:
        return SimpleNamespace(remote=self._start)

    def _start(self, spec: Any, *_: Any) -> StandInActor:
        starts = self.actors[spec.name]
        starts.append(StandInActor(self, spec.name, spec.command, iter(self.outcomes[spec.name][len(starts)])))
        return starts[-1]

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> None:
        assert strategy == "STRICT_PACK"
        self.bundles += bundles

    def wait(self, references: list[StandInActor], **_: Any) -> tuple[list[StandInActor], list[StandInActor]]:
        return references, []

    def get(self, reference: StandInActor) -> MemberReport:
        outcome = reference.outcome()
        if isinstance(outcome, RayError):
            raise outcome
        return outcome

    def kill(self, _actor: StandInActor) -> None:
        pass


NewRay = Callable[[Mapping[str, Sequence[Sequence[Outcome]]]], StandInRay]


@pytest.fixture
def new_ray(monkeypatch: pytest.MonkeyPatch) -> NewRay:
    def new(outcomes: Mapping[str, Sequence[Sequence[Outcome]]]) -> StandInRay:
        ray = StandInRay(outcomes)
        for module in (ray_cluster, ray_member):
            monkeypatch.setattr(module, "ray", ray)
        monkeypatch.setattr(ray_member, "placement_group", ray.placement_group)
        for name in ("NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy"):
            monkeypatch.setattr(ray_member, name, lambda *_, **__: None)
        return ray

    return new
