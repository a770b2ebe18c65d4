"""spangrad.credit: rewards -> advantages -> masked, weighted rows. See README.md in this folder."""

from spangrad.credit.assign import CreditConfig, CreditResult, assign
from spangrad.credit.gigpo import gigpo, gigpo_as_published, step_advantages
from spangrad.credit.grpo import dr_grpo, group_advantages, grpo
from spangrad.credit.pipeline import CreditedBatch, credited_rows
from spangrad.credit.rloo import rloo
from spangrad.credit.transition import CallSegment, Transition
from spangrad.credit.transitions import (
    Refused,
    informative,
    require_grade,
    row_to_json,
    trajectory_of,
    transitions,
    weigh,
)
from spangrad.credit.types import Step, Trajectory

__all__ = [
    "CallSegment",
    "CreditConfig",
    "CreditResult",
    "CreditedBatch",
    "Refused",
    "Step",
    "Trajectory",
    "Transition",
    "assign",
    "credited_rows",
    "dr_grpo",
    "gigpo",
    "gigpo_as_published",
    "group_advantages",
    "grpo",
    "informative",
    "require_grade",
    "rloo",
    "row_to_json",
    "step_advantages",
    "trajectory_of",
    "transitions",
    "weigh",
]
