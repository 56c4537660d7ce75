"""CustomResourceDefinitions, generated from the models: `python -m mooncake_core.api.crds --write DIR`."""

from mooncake_core.api.crds.definitions import definition, definitions
from mooncake_core.api.crds.files import differences, write
from mooncake_core.api.crds.structural import violations

__all__ = ["definition", "definitions", "differences", "violations", "write"]
