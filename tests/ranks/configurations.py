"""The optimizers that are saved and resumed: each class that torch has, with each of its flags."""

from __future__ import annotations

import torch

from tests.support.rules import ELEMENTWISE, RULES, Rule

# What the shared rules leave out: flags of one class, and pairs of flags that share a branch of the update.
MORE: list[Rule] = [
    Rule(torch.optim.Adagrad, {"lr": 0.125, "lr_decay": 0.1}),
    Rule(torch.optim.Adagrad, {"lr": 0.125, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "foreach": True}),
    Rule(torch.optim.Adam, {"lr": 0.125, "maximize": True, "foreach": True}),
    Rule(torch.optim.Adam, {"lr": torch.tensor(0.125), "amsgrad": True, "betas": (0.5, 0.75)}),
    Rule(torch.optim.AdamW, {"lr": 0.125, "amsgrad": True, "fused": True, "maximize": True}),
    Rule(torch.optim.NAdam, {"lr": 0.125, "momentum_decay": 0.5, "weight_decay": 0.1, "foreach": True}),
    Rule(torch.optim.SGD, {"lr": 0.125, "momentum": 0.9, "nesterov": True, "fused": True, "maximize": True}),
    Rule(torch.optim.SGD, {"lr": torch.tensor(0.125), "momentum": 0.9, "foreach": True}),
]
MATRIX: list[Rule] = [*RULES, *MORE]
# Of each class the rule with the most flags, and a tensor lr: for what differs in the wrapper and not in the class.
FEW: list[Rule] = [max((r for r in MATRIX if r.cls is c), key=lambda r: len(r.options)) for c in ELEMENTWISE.values()]
FEW.append(Rule(torch.optim.AdamW, {"lr": torch.tensor(0.125), "fused": True}))
