"""The certificate that needs no draws: the bound of an accountant."""

from dataclasses import dataclass
from typing import Any

from jaxacct.accountants import ACCOUNTANTS, analytic
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.records import differences, exact
from jaxacct.verification.certificate import PlanCertificate
from jaxacct.verification.target import Target


@dataclass(frozen=True)
class AnalyticBound(PlanCertificate):
    """An upper bound on delta(epsilon) by one of `jaxacct.accountants.ACCOUNTANTS`.

    Attributes:
      accountant: its name; None where a plan names none.
      delta: what it said.
    """

    kind = "analytic-bound"
    accountant: str | None
    delta: float | None

    @classmethod
    def computed(cls, mechanism: Mechanism, target: Target, accountant: str | None = None) -> "AnalyticBound":
        """By the accountant of that name, or by the one with the smallest bound."""
        return cls(*analytic.bound_by(accountant, mechanism, target.epsilon, target.compose_with))

    def recheck(self, mechanism: Mechanism, target: Target) -> list[str]:
        if self.accountant is None or self.delta is None:
            return ["neither evidence nor an analytic bound below delta"]
        try:
            fresh = self.computed(mechanism, target, self.accountant)
        except (ValueError, ArithmeticError) as error:
            return [str(error)]
        assert fresh.delta is not None
        if not fresh.delta <= target.budget.delta:
            return [f"{self.accountant} gives delta {fresh.delta:g}, above {target.budget.delta:g}"]
        # A bound above the one found today is true as well: a version before may have had a coarser one.
        if fresh.delta <= self.delta <= target.budget.delta:
            return []
        return differences(self.delta, fresh.delta, "analytic_delta")

    def fields(self) -> dict[str, Any]:
        return {"analytic_accountant": self.accountant, "analytic_delta": self.delta, "evidence": None}

    def to_json(self) -> dict[str, Any]:
        return self.fields()

    def lines(self, target: Target) -> list[str]:
        bound = f"delta({exact(target.epsilon)}) <= {exact(self.delta or 0.0)}"
        return [f"evidence              analytic: {bound}"]

    def how(self, target: Target) -> str:
        del target
        return f"by the analytic accountant {self.accountant!r}"

    def checked(self) -> list[str]:
        return [f"computed again: the bound of the accountant {self.accountant!r}, batch sizes"]

    def spends(self) -> list[tuple[str, float]]:
        return [(f"bound of {self.accountant}", self.delta or 0.0)]

    @property
    def reveals_all_coins(self) -> bool:
        accountant = ACCOUNTANTS.get(self.accountant or "")
        return accountant is not None and accountant.reveals_all_coins
