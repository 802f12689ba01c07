"""JSON of plans whose promise is computed from their fields alone: frozen dataclasses of plain values."""

import json
from dataclasses import asdict
from typing import Any, ClassVar, Self

from jaxacct.common.files import read_json, write_atomically
from jaxacct.common.records import read


class StoredPlan:
    """To JSON and back, with a schema, no field missing or added, and nothing read that does not hold."""

    schema: ClassVar[str] = ""
    training: ClassVar[str] = ""
    """What realises it: the name of a procedure of `train.loop`."""

    @property
    def certified(self) -> bool:
        """Whether the noise gives the promise, computed again."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"schema": self.schema, **asdict(self)}  # pyrefly: ignore[bad-argument-type]

    @classmethod
    def from_json(cls, data: dict) -> Self:
        """The plan in JSON values; ValueError for another thing, or a plan whose promise does not hold."""
        if not isinstance(data, dict) or data.get("schema") != cls.schema:
            had = data.get("schema") if isinstance(data, dict) else data
            raise ValueError(f"plan must have schema {cls.schema}, had {had!r:.80}")
        try:
            found = read(cls, {name: value for name, value in data.items() if name != "schema"}, "plan")
            certified = found.certified
        except TypeError as error:
            raise ValueError(f"plan has a field of a wrong type: {error}") from None
        except ArithmeticError as error:
            raise ValueError(f"plan has a number that cannot be computed with: {error}") from None
        if not certified:
            raise ValueError("plan must hold: its noise does not give its epsilon at its delta")
        return found

    def save(self, path) -> None:
        """Write it to a file, whole or not at all."""
        write_atomically(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path) -> Self:
        """Read it from a file, and check it."""
        return cls.from_json(read_json(path, "plan"))
