"""Prompts whose answers repeat them, and ones whose answers do not: what drafts without a model live on, and what they
must not slow down. Equal seeds give equal prompts; others differ from the first words on, so no prefix cache helps."""

import random

from onward.bench.prompts import random_words

_NAMES = ["price", "count", "weight", "length", "total", "offset", "limit", "speed", "score", "depth"]
_TOPICS = ("a lighthouse", "a lost letter", "an old clock", "the first snow", "a small harbour", "two neighbours")


def list_to_repeat(seed: str) -> str:
    """A list, and the beginning of its repetition."""
    entries = "\n".join(f"{number}. {random_words(3, f'{seed} {number}')}" for number in range(1, 13))
    return f"List {random_words(2, seed)}:\n{entries}\n\nThe same list once more, word for word:\n1."


def code_to_echo(seed: str) -> str:
    """A piece of code, and the beginning of a version with one name changed."""
    chance = random.Random(seed)
    old, new, *others = chance.sample(_NAMES, 6)
    lines = [f"def {random_words(1, seed)}_{chance.randrange(1000)}({old}, {', '.join(others)}):"]
    lines += [f"    {name} = {name} + {old} * {chance.randrange(2, 90)}" for name in others]
    lines += [f"    if {old} > {chance.randrange(100)}:", f"        return {others[0]} - {old}", f"    return {old}"]
    code = "\n".join(lines)
    return f"```python\n{code}\n```\n\nThe same function, with `{old}` renamed to `{new}`:\n\n```python\ndef"


def copying_prompt(seed: str) -> str:
    return code_to_echo(seed) if random.Random(f"kind of {seed}").random() < 0.5 else list_to_repeat(seed)


def free_prompt(seed: str) -> str:
    topic = random.Random(seed).choice(_TOPICS)
    return f"Notes: {random_words(60, seed)}\n\nA story about {topic}, told in plain words.\n\nOnce"
