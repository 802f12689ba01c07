"""Plans of any kind that training takes, from their files."""

import os

from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.accountants.tradeoff.plan import PLANS
from jaxacct.common.files import read_json
from jaxacct.core.plan import Plan


def read_plan(path: str | os.PathLike):
    """Return a plan of any kind, checked; ValueError for a file without a plan."""
    data = read_json(path, "plan")
    schema = data.get("schema") if isinstance(data, dict) else None
    return (PLANS | {DicePlan.schema: DicePlan}).get(str(schema), Plan).from_json(data)
