"""The contract of a method, as tests anyone can run.

>>> from coterie.checks import check_algorithm
>>> print(check_algorithm("fedavg", only=["seeds_decide", "zero_epochs_change_no_model"]))
FedAvg keeps the contract: 2 checks passed.
"""

from coterie.checks.contract import CHECKS
from coterie.checks.problem import Problem, tiny
from coterie.checks.report import (
    ENGINES,
    KERNELS,
    CheckResult,
    Report,
    assert_contract,
    check_algorithm,
)

__all__ = [
    "CHECKS",
    "ENGINES",
    "KERNELS",
    "CheckResult",
    "Problem",
    "Report",
    "assert_contract",
    "check_algorithm",
    "tiny",
]
