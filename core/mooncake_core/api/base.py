"""What every model of the API has in common: strict fields, and rules that Python and CEL both keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

GROUP = "mooncake.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
WRITE = "x-write"
"""Where a JSON schema keeps what `Write` says."""


@dataclass(frozen=True, slots=True)
class Write:
    """What to write into a field, shown behind every complaint about it."""

    text: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Take the text along, for the API server to show it too."""
        return {**handler(schema), WRITE: self.text}


class Problem(NamedTuple):
    """One complaint of a rule."""

    at: str
    """Path relative to the model that complains, in the manifest's spelling; empty = the model itself."""
    message: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A statement about several fields of one model, kept here and, as CEL, by the API server."""

    holds: Callable[[Any], bool]
    cel: str
    """The same statement as `x-kubernetes-validations` knows it."""
    message: str
    """What is wrong and what to write instead; the same words on both sides."""
    at: str = ""
    """The field to name, relative to the model, in the manifest's spelling."""


def server_rule(cel: str, message: str, at: str = "") -> Rule:
    """A rule that only the API server keeps."""
    return Rule(lambda _: True, cel, message, at)


class ApiModel(BaseModel):
    """Base of all API types: camelCase in manifests, unknown fields are errors, nothing is converted."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()
    SERVER_RULES: ClassVar[tuple[Rule, ...]] = ()
    """Rules for the API server only: what `problems` says better here, or what needs `oldSelf`."""

    def problems(self) -> Iterator[Problem]:
        """Complaints that no CEL rule can express; overridden by models that have some."""
        return iter(())

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_has_no_value(cls, content: Any) -> Any:
        """A field that is written without a value is absent, as it is to the API server."""
        if not isinstance(content, dict) or None not in content.values():
            return content
        known = {name for field, info in cls.model_fields.items() for name in (field, info.alias)}
        return {name: value for name, value in content.items() if value is not None or name not in known}

    @model_validator(mode="after")
    def _keep_rules(self) -> ApiModel:
        found = [Problem(rule.at, rule.message) for rule in type(self).RULES if not rule.holds(self)]
        found += self.problems()
        if found:
            text = "; ".join(f"{problem.at}: {problem.message}".removeprefix(": ") for problem in found)
            # Braces would be taken for a template by pydantic, hence the text as a value.
            raise PydanticCustomError("rules", "{text}", {"text": text, "problems": found})
        return self

    def manifest(self) -> dict[str, Any]:
        """The plain dictionary of a manifest or a request body: aliases, without what is not set."""
        return self.model_dump(by_alias=True, exclude_none=True)
