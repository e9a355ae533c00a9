from onward.bench.prompts import random_words, words_for_tokens


def test_prompts_of_different_seeds_begin_differently() -> None:
    beginnings = {tuple(random_words(110, f"0 {n}").split()[:4]) for n in range(200)}
    assert len(beginnings) == 200
    assert random_words(50, "a") == random_words(50, "a")


def test_two_probes_tell_how_many_words_make_a_length() -> None:
    # 30 tokens around the words, and 1.5 for each of them.
    assert words_for_tokens(180, ((16, 54), (64, 126))) == 100
    assert words_for_tokens(1, ((16, 54), (64, 126))) == 1
    assert words_for_tokens(40, ((16, 54), (64, 54))) == 40
