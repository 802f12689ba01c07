"""Base of plans whose guarantee is computed from their fields alone: frozen dataclasses of plain values."""

from dataclasses import asdict
from typing import Any, ClassVar, Self

from jaxacct.common.files import read_json, to_json, write_atomically
from jaxacct.common.records import exact, read


class StoredPlan:
    """Plan that loads only with its schema, exactly its fields, and a guarantee that holds.

    `training` is the name of the procedure of `train.procedures.protocol` that realises it.
    """

    schema: ClassVar[str] = ""
    training: ClassVar[str] = ""
    epsilon: float
    delta: float

    @property
    def certified(self) -> bool:
        """Whether the noise gives the guarantee, recomputed."""
        raise NotImplementedError

    @property
    def promise(self) -> str:
        """First words of the statement."""
        return f"({exact(self.epsilon)}, {exact(self.delta)})-differential privacy"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"schema": self.schema, **asdict(self)}  # pyrefly: ignore[bad-argument-type]

    @classmethod
    def from_json(cls, data: dict) -> Self:
        """Return the plan in JSON values; ValueError for other values, or a guarantee that does not hold."""
        schema = data.get("schema") if isinstance(data, dict) else data
        if schema != cls.schema:
            raise ValueError(f"plan must have schema {cls.schema}, got {schema!r:.80}")
        try:
            plan = read(cls, {name: value for name, value in data.items() if name != "schema"}, "plan")
            certified = plan.certified
        except (TypeError, ArithmeticError, NotImplementedError) as error:
            raise ValueError(f"plan has a field that cannot be computed with: {error}") from None
        if not certified:
            raise ValueError("plan must be valid: its noise does not give its epsilon at its delta")
        return plan

    def save(self, path) -> None:
        """Write the plan to a file, atomically."""
        write_atomically(path, to_json(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path) -> Self:
        """Return the plan in a file, checked; a one-line ValueError otherwise."""
        return cls.from_json(read_json(path, "plan"))
