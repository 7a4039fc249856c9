"""Run as a program: errors of ``fla-core``'s kernels, interpreted on CPU, against this package's functions, and how
many each pass launches; prints JSON. Needs ``TRITON_INTERPRET=1``, which Triton reads when functions are defined.

Two things stand in: an autotuner that times nothing and takes the first configuration, as there is no GPU to time, and
loop indices with a method ``to``, which the interpreter's lack.
"""

import builtins
import json
import sys
import warnings

warnings.simplefilter("ignore")

LENGTHS = (70, 3, 129)


class Index(int):
    def to(self, dtype):
        return self


def indices(*bounds):
    return map(Index, builtins.range(*map(int, bounds)))


def main():
    import torch
    from torch.nn import functional as F
    from triton.runtime import autotuner
    from triton.runtime.interpreter import InterpretedFunction

    autotuner.Autotuner.do_bench = property(lambda self: lambda call, quantiles: [1.0] * 3)
    launches, run = [], InterpretedFunction.run

    def noting(self, *args, **kwargs):
        launches.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    InterpretedFunction.run = noting
    import fla.modules.causal_conv1d
    import fla.ops.gated_delta_rule  # noqa: F401

    for name, module in [*sys.modules.items()]:
        if name.startswith("fla.") and hasattr(module, "tl"):
            module.range = indices

    from skyrl_megatron.runtime.model import delta_kernels, delta_rule

    generator, heads, ratio, key, value = torch.Generator().manual_seed(0), 2, 2, 16, 16
    tokens, place = sum(LENGTHS), torch.device("cpu")
    starts, plan = delta_kernels.sequence_starts(LENGTHS, place), delta_rule.chunk_plan(LENGTHS, place)

    def draw(*shape):
        return torch.randn(tokens, *shape, generator=generator)

    given = [draw(heads, key), draw(heads, key), draw(heads, ratio, value), -draw(heads, ratio).square()]
    given = [x.requires_grad_() for x in (*given, draw(heads, ratio).sigmoid())]
    q, k, *rest = given
    ours, _ = delta_rule.gated_delta_rule(delta_rule.l2_normalize(q), delta_rule.l2_normalize(k), *rest, plan)
    found, passes = {}, {}

    def compare(name, theirs, ours, given):
        weights = torch.randn(ours.shape, generator=generator)
        passes[f"{name} forward"] = len(launches)
        launches.clear()
        gradients = torch.autograd.grad((theirs * weights).sum(), given)
        passes[f"{name} backward"] = len(launches)
        launches.clear()
        expected = torch.autograd.grad((ours * weights).sum(), given)
        pairs = [(theirs, ours), *zip(gradients, expected, strict=True)]
        found[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

    launches.clear()
    compare("rule", delta_kernels.gated_delta_rule(*given, starts), ours, given)
    x, weight = draw(24).requires_grad_(), torch.randn(24, 4, generator=generator).requires_grad_()
    theirs = delta_kernels.convolve(x, weight, starts)
    compare("convolution", theirs, F.silu(delta_rule.short_convolution(x, weight, plan.positions)), (x, weight))
    print(json.dumps({"errors": found, "launches": passes}))


if __name__ == "__main__":
    main()
