from onward.obs.metrics import Registry, merge, without_gauges
from onward.obs.prometheus_text import render


def shares() -> list:
    registries = []
    for amount in (1, 2):
        registry = Registry()
        registry.counter("onward_things_total", "Things.", ["kind"]).inc("a", by=amount)
        registry.gauge("onward_level", "Level.", [], lambda amount=amount: {(): amount})
        registry.histogram("onward_wait_seconds", "Waits.", [0.1, 1.0]).observe(amount * 0.25)
        registries.append(registry.snapshot())
    return registries


def lines(text: bytes) -> list[str]:
    return text.decode().splitlines()


def test_shares_of_several_processes_are_added_up() -> None:
    text = lines(render(merge(shares())))
    assert 'onward_things_total{kind="a"} 3.0' in text
    assert "onward_level 3.0" in text
    assert 'onward_wait_seconds_bucket{le="1.0"} 2.0' in text
    assert "onward_wait_seconds_count 2.0" in text
    assert "onward_wait_seconds_sum 0.75" in text


def test_a_dead_process_leaves_what_it_counted_and_not_what_it_held() -> None:
    alive, dead = shares()
    text = lines(render(merge([alive, without_gauges(dead)])))
    assert 'onward_things_total{kind="a"} 3.0' in text
    assert "onward_level 1.0" in text


def test_an_observation_on_a_bound_counts_as_within_it() -> None:
    registry = Registry()
    registry.histogram("onward_wait_seconds", "Waits.", [0.1, 1.0]).observe(0.1)
    assert 'onward_wait_seconds_bucket{le="0.1"} 1.0' in lines(render(registry.snapshot()))


def test_label_values_are_escaped() -> None:
    registry = Registry()
    registry.counter("onward_things_total", "Things.", ["kind"]).inc('a"b\n')
    assert 'onward_things_total{kind="a\\"b\\n"} 1.0' in lines(render(registry.snapshot()))
