"""Admission rules by name."""

from quire.engine.admission.base import AdmissionRule
from quire.engine.admission.estimated import Estimated
from quire.engine.admission.optimistic import Optimistic
from quire.engine.admission.peaks import Peaks
from quire.engine.admission.reserved import Reserved
from quire.errors import UnknownName

RULES: dict[str, type[AdmissionRule]] = {
    rule.name: rule for rule in (Optimistic, Reserved, Estimated)
}


def make_admission(name: str, peaks: Peaks) -> AdmissionRule:
    """The rule of this name.

    Raises:
        UnknownName: there is none.
    """
    if name not in RULES:
        raise UnknownName("admission rule", name, RULES)
    return RULES[name](peaks)
