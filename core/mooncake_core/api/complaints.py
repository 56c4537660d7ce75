"""Pydantic's errors in the words of a manifest's author: the field's path, what is wrong, what to write."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mooncake_core.api.base import Problem, Write

_MESSAGES: Mapping[str, str] = {
    "missing": "is required",
    "greater_than_equal": "must be >= {ge} (got {got})",
    "less_than_equal": "must be <= {le} (got {got})",
    "string_type": "must be text (got {got}: put it in quotes)",
    "int_type": "must be a whole number (got {got})",
    "bool_type": "must be true or false (got {got})",
    "list_type": "must be a list (got {got})",
    "dict_type": "must be a mapping (got {got})",
    "model_type": "must be a mapping (got {got})",
    "string_pattern_mismatch": "is not valid (got {got})",
    "string_too_long": "must have at most {max_length} characters (got {length})",
    "string_too_short": "must have at least {min_length} characters (got {got})",
    "too_long": "must have at most {max_length} items (got {actual_length})",
}
_LONGEST_VALUE_SHOWN = 60


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an error's location leads in the models."""

    path: str
    model: type[BaseModel] | None
    """The model that holds the last step, if a model does."""
    remedy: str | None


def complaints(model: type[BaseModel], error: ValidationError) -> list[Problem]:
    """All problems of a refused document, each once, in the order of the model's fields."""
    found = dict.fromkeys(problem for details in error.errors() for problem in _complaint(model, details))
    seen: set[str] = set()
    kept = []
    for problem in found:
        # A union complains once for each of its members: the first is enough.
        if problem.at in seen and not problem.message.startswith("unknown"):
            continue
        seen.add(problem.at)
        kept.append(problem)
    return kept


def _complaint(model: type[BaseModel], details: ErrorDetails) -> Iterator[Problem]:
    place = _place(model, details["loc"])
    if details["type"] == "rules":
        for at, message in details.get("ctx", {})["problems"]:
            yield Problem(_join(place.path, at), message)
        return
    if details["type"] == "extra_forbidden":
        yield Problem(place.path, _unknown_field(place, str(details["loc"][-1])))
        return
    if details["type"] in ("literal_error", "enum"):
        message = _not_among(details)
        yield Problem(place.path, message)
        return
    template = _MESSAGES.get(details["type"])
    values = {"got": _shown(details["input"]), "length": _length(details["input"]), **details.get("ctx", {})}
    message = template.format_map(values) if template else details["msg"]
    yield Problem(place.path, f"{message}; write {place.remedy}" if place.remedy else message)


def _place(model: type[BaseModel], location: Iterable[int | str]) -> _Place:
    path, holder, remedy = "", None, None
    annotation: Any = model
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            remedy = _remedy(metadata=get_args(_item(annotation))[1:]) if annotation is not None else None
            annotation = _item(annotation)
            holder = None
            continue
        current = _model(annotation)
        if current is None:
            # A key of a free mapping, or the name of a union's member, which no author wrote.
            if _mapping(annotation):
                path = _join(path, part)
            continue
        holder = current
        path = _join(path, part)
        field = _field(current, part)
        annotation = field.annotation if field else None
        remedy = _remedy(field.metadata, annotation) if field else None
    return _Place(path, holder, remedy)


def _field(model: type[BaseModel], name: str) -> FieldInfo | None:
    for attribute, field in model.model_fields.items():
        if name in (field.alias, attribute):
            return field
    return None


def _unwrapped(annotation: Any) -> Iterator[Any]:
    """The members of an annotation behind Annotated, Optional and Union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _unwrapped(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _unwrapped(member)
    else:
        yield annotation


def _model(annotation: Any) -> type[BaseModel] | None:
    for member in _unwrapped(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _item(annotation: Any) -> Any:
    for member in _unwrapped(annotation):
        if get_origin(member) is list:
            return get_args(member)[0]
    return None


def _mapping(annotation: Any) -> bool:
    return any(get_origin(member) is dict for member in _unwrapped(annotation))


def _remedy(metadata: Iterable[Any], annotation: Any = None) -> str | None:
    """The author's hint: the outermost wins; an optional field carries it inside its union."""
    hints = [item.text for item in metadata if isinstance(item, Write)]
    if not hints and get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            hints += [item.text for item in get_args(member)[1:] if isinstance(item, Write)]
    return hints[-1] if hints else None


def _unknown_field(place: _Place, name: str) -> str:
    if place.model is None:
        return "unknown field; remove it"
    known = [field.alias or attribute for attribute, field in place.model.model_fields.items()]
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"unknown field; did you mean {close[0]}?"
    return f"unknown field; known here: {', '.join(sorted(known))}"


def _not_among(details: ErrorDetails) -> str:
    expected = str(details.get("ctx", {}).get("expected", "")).replace("'", "")
    message = f"must be {expected} (got {_shown(details['input'])})"
    words = expected.replace(" or ", ", ").split(", ")
    if isinstance(details["input"], str) and (close := _closest(details["input"], words)):
        return f"{message}; did you mean {close}?"
    return message


def _closest(word: str, known: list[str]) -> str | None:
    spelled = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word.lower(), list(spelled), n=1, cutoff=0.6)
    return spelled[close[0]] if close else None


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST_VALUE_SHOWN else f"{text[:_LONGEST_VALUE_SHOWN]}…"


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _join(path: str, step: str) -> str:
    if not path or not step:
        return path or step
    return f"{path}{step}" if step.startswith("[") else f"{path}.{step}"
