"""spangrad.credit: rewards -> advantages -> masked, weighted rows. See README.md in this folder."""

from spangrad.credit.aggregation import weigh
from spangrad.credit.assign import CreditResult, assign
from spangrad.credit.compare import Comparison, compare
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.filters import overlong_penalty, top_p_by_spread, top_share_by_spread, with_spread
from spangrad.credit.gae import gae_steps, gae_tokens
from spangrad.credit.gdpo import gdpo
from spangrad.credit.gigpo import gigpo, gigpo_as_published, step_advantages
from spangrad.credit.grpo import dr_grpo, group_advantages, grpo
from spangrad.credit.hgpo import hgpo, hgpo_as_published
from spangrad.credit.igpo import igpo, igpo_as_published
from spangrad.credit.information_gain import answer_potentials, information_gains
from spangrad.credit.labels import best, labelled
from spangrad.credit.maxrl import maxrl
from spangrad.credit.opo import opo
from spangrad.credit.pairs import Preferred, paired
from spangrad.credit.pass_at_k import best_of_group, pass_at_k, pass_hat_k
from spangrad.credit.pipeline import CreditedBatch, credited_rows
from spangrad.credit.reflection import Rationale, Reflections, Tried, reflected
from spangrad.credit.reinforce_pp import (
    reinforce_pp,
    reinforce_pp_baseline,
    reinforce_pp_baseline_as_published,
)
from spangrad.credit.rloo import rloo
from spangrad.credit.roles import role_advantages
from spangrad.credit.shaping import farming_gain, potential_based
from spangrad.credit.state_actions import state_action_advantages
from spangrad.credit.transition import CallSegment, Preference, Transition
from spangrad.credit.transitions import (
    Refused,
    informative,
    require_grade,
    row_to_json,
    trajectory_of,
    transitions,
)
from spangrad.credit.trees import edge_advantages, node_values, tree_grpo, tree_grpo_as_published, treerl
from spangrad.credit.turns import leave_one_out_to_go, mt_grpo, per_turn_index, turn_credit
from spangrad.credit.types import Step, Trajectory

__all__ = [
    "CallSegment",
    "Comparison",
    "CreditConfig",
    "CreditResult",
    "CreditedBatch",
    "Preference",
    "Preferred",
    "Rationale",
    "Reflections",
    "Refused",
    "Step",
    "Trajectory",
    "Transition",
    "Tried",
    "answer_potentials",
    "assign",
    "best",
    "best_of_group",
    "compare",
    "credited_rows",
    "dr_grpo",
    "edge_advantages",
    "farming_gain",
    "gae_steps",
    "gae_tokens",
    "gdpo",
    "gigpo",
    "gigpo_as_published",
    "group_advantages",
    "grpo",
    "hgpo",
    "hgpo_as_published",
    "igpo",
    "igpo_as_published",
    "information_gains",
    "informative",
    "labelled",
    "leave_one_out_to_go",
    "maxrl",
    "mt_grpo",
    "node_values",
    "opo",
    "overlong_penalty",
    "paired",
    "pass_at_k",
    "pass_hat_k",
    "per_turn_index",
    "potential_based",
    "reflected",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "reinforce_pp_baseline_as_published",
    "require_grade",
    "rloo",
    "role_advantages",
    "row_to_json",
    "state_action_advantages",
    "step_advantages",
    "top_p_by_spread",
    "top_share_by_spread",
    "trajectory_of",
    "transitions",
    "tree_grpo",
    "tree_grpo_as_published",
    "treerl",
    "turn_credit",
    "weigh",
    "with_spread",
]
