import msgspec

from onward.bench import environment


def test_the_facts_can_be_written_as_json_and_name_the_machine() -> None:
    facts = msgspec.json.decode(msgspec.json.encode(environment.describe_machine()))
    assert facts["cpu_cores"] >= 1 and facts["python"] and facts["platform"]
    assert facts["packages"]["aiohttp"]
