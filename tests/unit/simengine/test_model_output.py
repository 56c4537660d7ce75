from mooncake_simulator.engine.output import output_of

WORDS = list(range(10, 60))


def said(prompt: list[int], *, seed: int = 0, eos_after: int | None = None, mean: int = 0) -> list[int]:
    model = output_of(
        prompt, seed=seed, vocabulary=WORDS, eos_token=2, mean_output_tokens=mean, eos_after=eos_after
    )
    return [model(position) for position in range(50)]


def test_the_same_prompt_gives_the_same_answer_on_every_engine() -> None:
    assert said([1, 2, 3]) == said([1, 2, 3])


def test_other_prompts_and_other_seeds_give_other_answers() -> None:
    assert said([1, 2, 3]) != said([1, 2, 4])
    assert said([1, 2, 3]) != said([1, 2, 3], seed=7)


def test_only_words_of_the_vocabulary_are_said_when_there_is_no_natural_end() -> None:
    assert set(said([1, 2, 3])) <= set(WORDS)


def test_the_end_token_comes_where_it_was_ordered() -> None:
    assert said([5], eos_after=0)[0] == 2
    answer = said([5], eos_after=7)
    assert 2 not in answer[:7]
    assert answer[7] == 2


def test_natural_lengths_differ_by_prompt_and_are_near_their_mean() -> None:
    lengths = []
    for number in range(400):
        model = output_of([number], seed=0, vocabulary=WORDS, eos_token=2, mean_output_tokens=20)
        lengths.append(next(position for position in range(1000) if model(position) == 2))
    assert min(lengths) >= 1
    assert 15 < sum(lengths) / len(lengths) < 25
