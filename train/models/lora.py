"""Low-rank adapters of linear layers, which are trained while all other weights are frozen."""

from typing import Any

from flax import nnx


def add_lora(model: nnx.Module, rank: int, rngs: nnx.Rngs) -> None:
    """Give every `nnx.Linear` that is an attribute of a module in `model` an adapter, in place.

    `x W + b` becomes `x W + b + x A B`, initially B = 0 (LoRA, arXiv 2106.09685); A and B are
    `nnx.LoRAParam`, W and b stay the same arrays.
    """
    modules = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
    for module in modules:
        for name, linear in list(vars(module).items()):
            if type(linear) is nnx.Linear:
                sizes = linear.in_features, linear.out_features
                given: dict[str, Any] = dict(lora_rank=rank, use_bias=linear.use_bias, rngs=rngs)
                # Initializers that return the existing arrays: no other W is drawn.
                given |= dict(kernel_init=_given(linear.kernel), bias_init=_given(linear.bias))
                lora = nnx.LoRALinear(*sizes, **given)
                lora.kernel, lora.bias = linear.kernel, linear.bias
                setattr(module, name, lora)


def _given(variable):
    return lambda *_: variable[...]
