"""What a set-up is called: by what tells it apart from those beside it."""

from __future__ import annotations

from collections.abc import Sequence

from mooncakectl.simulate.runs import Answer, Question


def set_up(question: Question) -> dict[str, str]:
    """What a run may differ in, as people read it."""
    spec = question.spec
    return {
        "P+D": f"{spec.prefill}+{spec.decode}",
        "profile": spec.profile.name,
        "speed": f"{question.speed:g}×",
        "policy": spec.policy,
        "admission": spec.admission.value,
        "tiers": "" if spec.tiers is None else spec.tiers.rule,
    }


def varying(answers: Sequence[Answer]) -> list[str]:
    """In what the runs differ."""
    set_ups = [set_up(each.question) for each in answers]
    return [name for name in set_ups[0] if len({each[name] for each in set_ups}) > 1]


def common(answers: Sequence[Answer]) -> str:
    """What all runs have in common."""
    varies = varying(answers)
    return " · ".join(
        value for name, value in set_up(answers[0].question).items() if value and name not in varies
    )


def names(answers: Sequence[Answer]) -> list[str]:
    """Of each run what is its own; of a single one, all."""
    varies = varying(answers)
    shown = [set_up(each.question) for each in answers]
    return [
        " · ".join(v for name, v in each.items() if v and (name in varies or not varies)) for each in shown
    ]
