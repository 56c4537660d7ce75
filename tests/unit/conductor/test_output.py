"""Predicted answer lengths."""

import pytest

from mooncake_scheduler.conductor.output import MOST_CLASSES, OutputPrediction


def learned(*answers, default=256):
    output = OutputPrediction(default)
    for tenant, prompt, tokens, limit in answers:
        output.observe(tenant, prompt, tokens, max_tokens=limit)
    return output


def test_before_anything_was_learned_the_default_counts_within_the_limit():
    output = OutputPrediction(256)
    assert output.predict("a", 1_000) == 256
    assert output.predict("a", 1_000, 64) == 64
    assert output.predict("a", 1_000, 4_096) == 256


def test_a_tenant_with_its_own_habits_is_predicted_by_them():
    output = learned(*[("long", 1_000, 900, None), ("short", 1_000, 20, None)] * 20)
    assert output.predict("long", 1_000) == 900
    assert output.predict("short", 1_000) == 20


def test_prompt_lengths_of_one_class_share_what_is_learned():
    output = learned(*[("a", 1_000, 500, None), ("a", 60_000, 50, None)] * 20)
    assert output.predict("a", 900) == 500
    assert output.predict("a", 40_000) == 50


def test_an_unseen_class_is_predicted_by_the_mean_of_all():
    output = learned(*[("a", 1_000, 100, None), ("a", 1_000, 300, None)] * 20)
    assert output.predict("b", 5) == 200


def test_limits_that_proved_exact_are_believed():
    answers = [("a", 1_000, tokens, tokens) for tokens in (10, 900, 50, 700, 5, 300) * 5]
    assert learned(*answers).predict("a", 1_000, 650) == 650


def test_limits_that_are_never_reached_are_not_believed():
    assert learned(*[("a", 1_000, 100, 8_192)] * 20).predict("a", 1_000, 8_192) == 100


def test_the_way_that_errs_less_is_used():
    # All answers have become longer. The tenant's own mean still lags; that of all is ahead and errs less.
    answers = [("a", 1_000, 100)] * 20 + [("b", 60_000, 500)] * 600 + [("a", 1_000, 500)] * 8
    output = learned(*((*answer, None) for answer in answers))
    assert output.predict("a", 1_000) == pytest.approx(500, rel=0.1)


def test_habits_that_change_are_followed():
    output = learned(*[("a", 1_000, 100, None)] * 300, *[("a", 1_000, 500, None)] * 800)
    assert output.predict("a", 1_000) == pytest.approx(500, rel=0.05)


def test_memory_is_bounded():
    output = OutputPrediction()
    for i in range(MOST_CLASSES + 50):
        output.observe(f"t{i}", 100, 10)
    assert len(output._classes) == MOST_CLASSES


def test_a_default_has_to_be_positive():
    with pytest.raises(ValueError, match="default_tokens"):
        OutputPrediction(0)
