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


def _is_told_to_do_the_default(rule: Rule) -> bool:
    # On the CPU foreach=False is what a class does anyway.
    return (
        rule.options.keys() == {"lr", "foreach"} and not rule.options["foreach"] and type(rule.options["lr"]) is float
    )


MATRIX: dict[int, Rule] = dict(enumerate([*(rule for rule in RULES if not _is_told_to_do_the_default(rule)), *MORE]))


def _most_flags(cls: type[torch.optim.Optimizer]) -> int:
    return max((index for index, rule in MATRIX.items() if rule.cls is cls), key=lambda i: len(MATRIX[i].options))


def _fused_with_tensor_lr(cls: type[torch.optim.Optimizer]) -> int:
    found = (i for i, rule in MATRIX.items() if rule.cls is cls and isinstance(rule.options["lr"], torch.Tensor))
    return next(index for index in found if MATRIX[index].options.get("fused"))


# For what differs in the wrapper and not in the class: of each class the rule with the most flags, and a tensor lr.
FEW: dict[int, Rule] = {
    index: MATRIX[index]
    for index in (*map(_most_flags, ELEMENTWISE.values()), _fused_with_tensor_lr(torch.optim.AdamW))
}
