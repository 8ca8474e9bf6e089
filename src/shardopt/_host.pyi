from torch import Tensor

def available_isas() -> list[str]: ...
def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    param_scale: float,
    grad_weight: float,
    beta2: float,
    square_weight: float,
    step_size: float,
    bias_correction: float,
    eps: float,
    isa: str,
) -> None: ...
