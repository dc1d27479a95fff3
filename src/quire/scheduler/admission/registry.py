"""Admission rules by name."""

from quire.errors import UnknownName
from quire.scheduler.admission.base import AdmissionRule
from quire.scheduler.admission.estimated import Estimated
from quire.scheduler.admission.optimistic import Optimistic
from quire.scheduler.admission.peaks import Peaks
from quire.scheduler.admission.reserved import Reserved

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
